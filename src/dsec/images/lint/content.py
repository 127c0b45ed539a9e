"""Content of files by their extents in data devices. Blocks: for the child process."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsec.images.erofs.tree import BLOCK, HOLE, Inode


class Devices:
    """The data devices of an environment's parts, opened for reading."""

    def __init__(self, parts: Sequence[Sequence[Path]]) -> None:
        """Open them all; one that several parts share is opened once.

        Raises:
            OSError: one is missing.
        """
        opened = {
            path: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for part in parts for path in part
        }
        self._parts = [[opened[path] for path in part] for part in parts]

    def read(self, part: int, inode: Inode, offset: int, length: int) -> bytes:
        """Bytes of a regular file, cut at its end.

        Raises:
            OSError: a device is shorter than it should be, or does not give its data.
        """
        end = min(offset + length, inode.size)
        return b"".join(self._pieces(self._parts[part], inode, offset, end))

    def _pieces(self, devices: list[int], inode: Inode, start: int, end: int) -> Iterator[bytes]:
        at = 0
        for extent in inode.extents:
            size = extent.blocks * BLOCK
            first, last = max(start, at), min(end, at + size)
            if first < last and extent.device == HOLE:
                yield bytes(last - first)
            elif first < last:
                where = extent.block * BLOCK + first - at
                yield _read_whole(devices[extent.device], last - first, where)
            at += size


def _read_whole(descriptor: int, length: int, offset: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            raise OSError(errno.EIO, "a data device is shorter than its layer says")
        data += more
    return data
