"""Files with holes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


def copy_sparse(source: int, target: int) -> None:
    """Make a new file equal to another of the same file system, holes as holes. Blocks.

    Only what is written in the source is copied, or shared where the file system can share it.

    Args:
        source: descriptor of the file to copy.
        target: descriptor of an empty file.

    Raises:
        OSError: ENOSPC, or EXDEV on different file systems.
    """
    os.ftruncate(target, os.fstat(source).st_size)
    for start, end in data_extents(source):
        _copy(source, target, start, end)


def data_extents(file: int) -> Iterator[tuple[int, int]]:
    """Where a file has data: first byte, and the one after the last."""
    end = 0
    while True:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end


def _copy(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        copied = os.copy_file_range(source, target, end - start, start, start)
        if not copied:
            raise OSError(errno.EIO, "copy_file_range: the source became shorter")
        start += copied
