"""The cached devices nobody has open: how much they take, and their removal, oldest first."""

from __future__ import annotations

import re
from pathlib import Path

import anyio

from dsec.images.disk import remove_tree
from dsec.kit.blocking import in_thread

_HEX = re.compile("[0-9a-f]{64}")
_GONE = "gone-"
_STAT_BLOCK = 512


class ClosedDevices:
    """Those in one cache directory."""

    def __init__(self, cache: Path) -> None:
        """Know of none yet; see `look`."""
        self._cache = cache
        self._bytes: dict[str, int] = {}
        self._lock = anyio.Lock()

    @property
    def closed_bytes(self) -> int:
        """What they take of the disk."""
        return sum(self._bytes.values())

    async def look(self) -> None:
        """Find those that are there, oldest first, and clear up after an interrupted removal."""
        self._bytes = await in_thread("disk", _found, self._cache)

    async def take(self, name: str) -> None:
        """A device is about to be opened; returns when no removal of it is under way."""
        async with self._lock:
            self._bytes.pop(name, None)

    def give_back(self, name: str, size_bytes: int) -> None:
        """A device was closed."""
        self._bytes[name] = size_bytes

    async def drop_oldest(self) -> int:
        """Remove the one that was closed first; bytes freed, 0 if there is none."""
        async with self._lock:
            while self._bytes:
                name = next(iter(self._bytes))
                size = self._bytes.pop(name)
                await in_thread("disk", _remove, self._cache, name)
                if size:
                    return size
        return 0


def _found(cache: Path) -> dict[str, int]:
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    ages: list[tuple[int, str, int]] = []
    for entry in cache.iterdir():
        if entry.name.startswith(_GONE):
            remove_tree(entry)
        elif _HEX.fullmatch(entry.name):
            data = entry / "data"
            blocks = data.stat().st_blocks if data.exists() else 0
            ages.append((entry.stat().st_mtime_ns, entry.name, blocks * _STAT_BLOCK))
    return {name: size for _, name, size in sorted(ages)}


def _remove(cache: Path, name: str) -> None:
    gone = cache / f"{_GONE}{name}"
    (cache / name).rename(gone)
    remove_tree(gone)
