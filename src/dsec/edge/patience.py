"""Deadlines of one sandbox's operations, which stand still while it does.

A command's own limit is aether's business; these are the edge's, against an aether that does not
answer. A paused one cannot, so the time of its pause does not count.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import anyio

from dsec.base.errors import DeadlineExceeded


class Patience:
    """The deadlines that are open."""

    __slots__ = ("_held", "_open")

    def __init__(self) -> None:
        self._open: dict[anyio.CancelScope, float] = {}
        """Each with the seconds it has left, which are true while they are held."""
        self._held = False

    def hold(self) -> None:
        """Time does not count from now on. Harmless twice."""
        if self._held:
            return
        self._held = True
        now = anyio.current_time()
        for scope in self._open:
            self._open[scope] = scope.deadline - now
            scope.deadline = math.inf

    def release(self) -> None:
        """Time counts again. Harmless twice."""
        if not self._held:
            return
        self._held = False
        now = anyio.current_time()
        for scope, left in self._open.items():
            scope.deadline = now + left

    @contextlib.contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """Bound the waiting for a sandbox by time in which it was not paused.

        Raises:
            DeadlineExceeded: it took longer.
        """
        with anyio.CancelScope() as scope:
            self._open[scope] = seconds
            if not self._held:
                scope.deadline = anyio.current_time() + seconds
            try:
                yield
            finally:
                del self._open[scope]
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"{what} took over {seconds:.0f} s", seconds=seconds)
