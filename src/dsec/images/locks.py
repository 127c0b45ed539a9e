"""One task at a time per key."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable

import anyio


class KeyedLock:
    """A lock per key, forgotten when nobody holds or awaits it."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, anyio.Lock] = {}
        self._users: Counter[Hashable] = Counter()

    @contextlib.asynccontextmanager
    async def holding(self, key: Hashable) -> AsyncIterator[None]:
        """Hold the key's lock."""
        lock = self._locks.setdefault(key, anyio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]
