"""Runs of host user ids, one per live sandbox."""

from __future__ import annotations

import heapq

RUN = 65536
FIRST = 1 << 20
"""Above what distributions hand out for users and their subordinate ids by default."""
LAST = (1 << 32) - RUN


class UidRuns:
    """Hands out the lowest free run."""

    def __init__(self, first: int = FIRST) -> None:
        if first % RUN:
            raise ValueError(f"the first host id {first} is not a multiple of {RUN}")
        self._next = first
        self._freed: list[int] = []
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """How many are left."""
        return len(self._freed) + max(0, (LAST - self._next) // RUN)

    def take(self) -> int:
        """The lowest free one.

        Raises:
            IndexError: there is none.
        """
        while True:
            if self._freed:
                base = heapq.heappop(self._freed)
            elif self._next < LAST:
                base, self._next = self._next, self._next + RUN
            else:
                raise IndexError("no run of host ids is free")
            if base not in self._used:
                self._used.add(base)
                return base

    def claim(self, base: int) -> None:
        """One that a sandbox of an earlier run of the edge still has."""
        self._used.add(base)

    def give_back(self, base: int) -> None:
        """Its sandbox is over."""
        if base in self._used:
            self._used.discard(base)
            if base < self._next:
                heapq.heappush(self._freed, base)
