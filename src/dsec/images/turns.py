"""Work that takes much of a node, one at a time: a few may wait, the rest are told to come back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio

from dsec.base.errors import RateLimited

MAX_WAITING = 4
PATIENCE_S = 30.0


class Turns:
    """The turns at one kind of work."""

    def __init__(self, what: str, patience_s: float = PATIENCE_S) -> None:
        """Begin with nobody at it.

        Args:
            what: the work, for the message; such as "looking environments over".
            patience_s: how long one waits for a turn.
        """
        self._what = what
        self._patience_s = patience_s
        self._lock = anyio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Have the turn.

        Raises:
            RateLimited: as many as may are waiting, or it did not come in time.
        """
        await self._take()
        try:
            yield
        finally:
            self._lock.release()

    async def _take(self) -> None:
        if self._lock.statistics().tasks_waiting >= MAX_WAITING:
            raise self._busy()
        try:
            with anyio.fail_after(self._patience_s):
                await self._lock.acquire()
        except TimeoutError:
            raise self._busy() from None

    def _busy(self) -> RateLimited:
        return RateLimited(
            f"this node is busy {self._what} for others", retry_after_s=self._patience_s
        )
