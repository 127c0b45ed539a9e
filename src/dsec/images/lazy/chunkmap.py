"""Which chunks are here: one byte per chunk in a file mapped shared, so a killed worker loses none.

The kernel keeps the pages of the map when the process dies, as it keeps those of the data; what
was written before a mark is there whenever the mark is.
"""

from __future__ import annotations

import mmap
from pathlib import Path

_ABSENT = b"\0"
_PRESENT = b"\1"


class ChunkMap:
    """The map of one device. Single operations are atomic to other threads (they hold the GIL)."""

    def __init__(self, path: Path, count: int) -> None:
        """Map a file of `count` bytes.

        All of them must be allocated: a hole could not be written on a full disk, and the process
        would get SIGBUS.

        Raises:
            OSError, ValueError: the file is not there, or shorter.
        """
        self.count = count
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), count)

    def covers(self, first: int, end: int) -> bool:
        """Whether all of `first` to `end` (exclusive) are here."""
        return self._bytes.find(_ABSENT, first, end) < 0

    def missing(self, first: int, end: int) -> list[int]:
        """Those of `first` to `end` that are not here."""
        return [chunk for chunk, here in enumerate(self._bytes[first:end], first) if not here]

    def present(self, first: int, end: int) -> int:
        """How many of `first` to `end` are here."""
        return self._bytes[first:end].count(_PRESENT)

    def mark(self, first: int, end: int) -> None:
        """Say that they are here; their bytes must have been written."""
        self._bytes[first:end] = _PRESENT * (end - first)

    def unmark(self, first: int, end: int) -> None:
        """Say that they are not here; only then may their bytes go."""
        self._bytes[first:end] = bytes(end - first)

    def flush(self) -> None:
        """Push it to the disk. Blocks."""
        self._bytes.flush()

    def close(self) -> None:
        """Give the mapping up."""
        self._bytes.close()
