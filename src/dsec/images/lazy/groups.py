"""The windows of a device as the cache sees them: used lately, idle, held, or being thrown out.

One byte per group, so that reads note their use in a fraction of a microsecond and the hand of the
clock (`budget.py`) passes thousands of groups in one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

_IDLE = 0
_FILLED = 1
_USED = 3
_EMPTY = 4
_TICK = bytes([_IDLE, _IDLE, _FILLED, 2, _EMPTY])
"""What each state becomes when the hand passes: it takes three rounds until a group that was used
again after it was filled is idle, so that what is read once does not drive it out."""
ROUNDS = 3
_TABLE = _TICK + bytes(range(len(_TICK), 256))


class Groups:
    """The groups of one device; chunks of a group are evicted together."""

    def __init__(self, chunks: int, per_group: int) -> None:
        self.per_group = per_group
        self.count = -(-chunks // per_group)
        self._chunks = chunks
        self._state = bytearray([_EMPTY]) * self.count
        self._pins: Counter[int] = Counter()
        self._leaving: set[int] = set()
        self._changed = anyio.Event()

    def used(self, first: int, end: int) -> None:
        """Chunks that were here were read."""
        low, high = self._of(first, end)
        self._state[low:high] = bytes((_USED,)) * (high - low)

    def filled(self, first: int, end: int) -> None:
        """Chunks have come."""
        for group in range(*self._of(first, end)):
            if self._state[group] in (_EMPTY, _IDLE):
                self._state[group] = _FILLED

    def span(self, group: int) -> tuple[int, int]:
        """First chunk and end of a group."""
        return group * self.per_group, min((group + 1) * self.per_group, self._chunks)

    @property
    def pinned(self) -> bool:
        """Whether anything of the device is held."""
        return bool(self._pins)

    @contextmanager
    def pin(self, first: int, end: int) -> Iterator[None]:
        """Hold chunks: their groups are not evicted while the context lasts."""
        held = range(*self._of(first, end))
        self._pins.update(held)
        try:
            yield
        finally:
            for group in held:
                self._pins[group] -= 1
                if not self._pins[group]:
                    del self._pins[group]
            self._tell()

    @contextmanager
    def leaving(self, groups: list[int]) -> Iterator[None]:
        """Throw groups out: nothing is filled into them meanwhile."""
        for group in groups:
            self._state[group] = _EMPTY
        self._leaving.update(groups)
        try:
            yield
        finally:
            self._leaving.difference_update(groups)
            self._tell()

    async def wait_left(self, first: int, end: int) -> None:
        """Wait until none of these chunks is being thrown out. Pin them before."""
        while self._leaving and not self._leaving.isdisjoint(range(*self._of(first, end))):
            await self._changed.wait()

    async def wait_unpinned(self) -> None:
        """Wait until nothing of the device is held."""
        while self._pins:
            await self._changed.wait()

    def pass_hand(self, at: int) -> int | None:
        """Move the hand from a group to the next idle one that can go, or None at the end.

        Groups passed are a step nearer to idle.
        """
        while True:
            found = self._state.find(_IDLE, at)
            end = found if found >= 0 else self.count
            self._state[at:end] = self._state[at:end].translate(_TABLE)
            if found < 0:
                return None
            if not self._pins.get(found):
                return found
            at = found + 1

    def _of(self, first: int, end: int) -> tuple[int, int]:
        return first // self.per_group, -(-end // self.per_group)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
