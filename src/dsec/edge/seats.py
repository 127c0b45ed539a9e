"""So many may do a thing at once on this node, and no project more than its share of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from dsec.base.errors import RateLimited

RETRY_AFTER_S = 1.0


class Seats:
    """The seats for one kind of work. Nobody waits for one: who finds none is told to come back."""

    def __init__(self, what: str, count: int, share: int) -> None:
        """Begin with all of them free.

        Args:
            what: the work, for the message; such as "reading trajectories".
            count: how many there are.
            share: how many of them one project may have.
        """
        self._what = what
        self._count = count
        self._share = share
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How many are taken."""
        return self._taken.total()

    @contextlib.contextmanager
    def seat(self, project: str) -> Iterator[None]:
        """Have one.

        Raises:
            RateLimited: all are taken, or the project has its share.
        """
        self._check(project)
        self._taken[project] += 1
        try:
            yield
        finally:
            self._taken[project] -= 1
            self._taken += Counter()  # forgets those who have none

    def _check(self, project: str) -> None:
        if self._taken[project] >= self._share:
            who = f"this project is {self._what} {self._share} times at once on this node"
        elif self.taken >= self._count:
            who = f"this node is {self._what} for {self._count} others"
        else:
            return
        raise RateLimited(f"{who}, and more it may not", retry_after_s=RETRY_AFTER_S)
