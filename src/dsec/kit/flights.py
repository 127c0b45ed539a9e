"""One at a time per key, within this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

import anyio


class Flights:
    """Locks that exist only while somebody holds or awaits them."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[anyio.Lock, int]] = {}

    def __bool__(self) -> bool:
        """Whether anybody holds or awaits one."""
        return bool(self._locks)

    @asynccontextmanager
    async def alone(self, key: Hashable) -> AsyncIterator[None]:
        """Run with no other under the same key."""
        lock, users = self._locks.get(key, (anyio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, users - 1)
