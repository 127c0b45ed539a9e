"""A directory tree in memory: what an EROFS image says, before it is written or after it is read.

A hard link is one `Inode` under several names. Deletions and opaque directories are held as
overlayfs has them on disk: a character device 0:0, and the xattr `trusted.overlay.opaque`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

BLOCK = 4096
HOLE = -1
OPAQUE_XATTR = b"trusted.overlay.opaque"


@dataclass(frozen=True, slots=True)
class Device:
    """A file of raw data that inodes point into, in whole blocks of 4 KiB."""

    digest: str
    """`sha256:<hex>` of the whole data."""
    size_bytes: int
    """A multiple of `BLOCK`."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of a file's blocks. A file's extents follow each other and cover it."""

    device: int
    """Index into the image's devices; `HOLE` = zeros."""
    block: int
    """First block in the device; 0 for a hole."""
    blocks: int


def join_extents(extents: Iterable[Extent]) -> list[Extent]:
    """The same blocks in as few extents as there can be."""
    joined: list[Extent] = []
    for extent in extents:
        if joined and _follows(joined[-1], extent):
            last = joined[-1]
            joined[-1] = Extent(last.device, last.block, last.blocks + extent.blocks)
        else:
            joined.append(extent)
    return joined


def _follows(first: Extent, second: Extent) -> bool:
    if first.device != second.device:
        return False
    return first.device == HOLE or first.block + first.blocks == second.block


@dataclass(slots=True, eq=False)
class Inode:
    """One file of any kind. Compared by identity: two names of it are hard links."""

    mode: int
    """As `st_mode`: kind and permissions."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    """Of a regular file, in bytes."""
    rdev: int = 0
    """As `st_rdev`."""
    target: bytes = b""
    """Of a symbolic link."""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    """By full name, e.g. `security.capability`."""
    extents: list[Extent] = field(default_factory=list)
    children: dict[bytes, Inode] = field(default_factory=dict)
    """Of a directory, in any order; without `.` and `..`."""

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_whiteout(self) -> bool:
        """Whether it stands for the deletion of what is below."""
        return stat.S_ISCHR(self.mode) and self.rdev == 0

    @property
    def is_opaque(self) -> bool:
        """Whether it is a directory that hides all below it."""
        return self.is_dir and self.xattrs.get(OPAQUE_XATTR) == b"y"


@dataclass(slots=True)
class Tree:
    """An image's content: its root directory, and the devices its extents point into."""

    root: Inode
    devices: list[Device] = field(default_factory=list)

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Every name with its inode, parents before children, names in byte order.

        The root's name is b""; others are relative, without a leading slash.
        """
        pending: list[tuple[bytes, Inode]] = [(b"", self.root)]
        while pending:
            path, inode = pending.pop()
            yield path, inode
            below = sorted(inode.children.items(), reverse=True)
            pending.extend((b"%s/%s" % (path, name) if path else name, c) for name, c in below)
