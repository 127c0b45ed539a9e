"""Trees for tests: made at random, put into words that can be compared, and with real content."""

# Names are arbitrary bytes: `os`, not pathlib.
# ruff: noqa: PTH115, PTH118, PTH123, PTH208

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from dsec.images.erofs.tree import (
    BLOCK,
    HOLE,
    OPAQUE_XATTR,
    Device,
    Extent,
    Inode,
    Tree,
    join_extents,
)

ACL = bytes.fromhex("02000000 01000600ffffffff 02000700e8030000 04000400ffffffff") + bytes.fromhex(
    "10000700ffffffff 20000400ffffffff"
)
"""user::rw-, user:1000:rwx, group::r--, mask::rwx, other::r--."""
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
"""security.capability of a file with cap_net_raw=p."""
_KINDS = [stat.S_IFREG] * 6 + [stat.S_IFDIR] * 5 + [stat.S_IFLNK] * 2
_KINDS += [stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK]
_XATTRS = {
    b"user.note": b"kept",
    b"user.empty": b"",
    b"trusted.x": bytes(range(256)),
    b"security.capability": CAPABILITY,
    b"system.posix_acl_access": ACL,
}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def make_data(rng: random.Random, blocks: int) -> bytes:
    return rng.randbytes(blocks * BLOCK)


@dataclass
class RandomTrees:
    """Makes trees; the fewer names, the more they collide when layers are merged."""

    rng: random.Random
    names: Sequence[bytes] = ()
    """Empty: any bytes a name can have."""
    overlay: bool = False
    """With whiteouts and opaque directories."""
    entries: int = 30

    def make(self, devices: Sequence[Device]) -> Tree:
        tree = Tree(self._directory(), list(devices))
        directories, others = [tree.root], [self._other(devices)]
        for _ in range(self.rng.randrange(self.entries)):
            parent = self.rng.choice(directories)
            name = self._name()
            if name in parent.children:
                continue
            parent.children[name] = inode = self._inode(devices, others)
            (directories if inode.is_dir else others).append(inode)
        return tree

    def _name(self) -> bytes:
        if self.names:
            return self.rng.choice(self.names)
        length = self.rng.choice([1, 2, 5, 60, 255])
        name = bytes(self.rng.choice(_NAME_BYTES) for _ in range(length))
        return name if name not in (b".", b"..") else b"dots"

    def _inode(self, devices: Sequence[Device], others: list[Inode]) -> Inode:
        chance = self.rng.random()
        if self.overlay and chance < 0.15:
            return Inode(stat.S_IFCHR)
        if chance > 0.85:
            return self.rng.choice(others)
        kind = self.rng.choice(_KINDS)
        return self._directory() if kind == stat.S_IFDIR else self._other(devices, kind)

    def _directory(self) -> Inode:
        inode = self._attributes(stat.S_IFDIR)
        if self.overlay and self.rng.random() < 0.25:
            inode.xattrs[OPAQUE_XATTR] = b"y"
        return inode

    def _other(self, devices: Sequence[Device], kind: int = stat.S_IFREG) -> Inode:
        inode = self._attributes(kind)
        if kind == stat.S_IFREG:
            self._fill(inode, devices)
        elif kind == stat.S_IFLNK:
            inode.mode = kind | 0o777
            length = self.rng.choice([1, 10, 3000, 4031, 4032, 4033, 4095])
            inode.target = bytes(self.rng.choice(_NAME_BYTES) for _ in range(length))
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            inode.rdev = os.makedev(self.rng.randrange(1, 4096), self.rng.randrange(1 << 20))
        return inode

    def _attributes(self, kind: int) -> Inode:
        rng = self.rng
        names = [n for n in _XATTRS if rng.random() < 0.15 and kind == stat.S_IFREG]
        if kind != stat.S_IFREG and rng.random() < 0.2:
            names = [b"trusted.x"]
        return Inode(
            mode=kind | rng.randrange(0o10000),
            uid=rng.choice([0, 1000, 4_000_000_000]),
            gid=rng.choice([0, 1000, 4_000_000_001]),
            mtime_ns=rng.choice([0, 1, 1_700_000_000_123_456_789, -1_500_000_000, 1 << 62]),
            xattrs={name: _XATTRS[name] for name in names},
        )

    def _fill(self, inode: Inode, devices: Sequence[Device]) -> None:
        blocks = self.rng.choice([0, 1, 1, 2, 7, 16, 40])
        inode.size = max(0, blocks * BLOCK - self.rng.choice([0, 1, 4095]))
        while blocks:
            count = self.rng.randint(1, blocks)
            blocks -= count
            inode.extents.append(self._extent(devices, count))

    def _extent(self, devices: Sequence[Device], blocks: int) -> Extent:
        if not devices or self.rng.random() < 0.2:
            return Extent(HOLE, 0, blocks)
        index = self.rng.randrange(len(devices))
        last = devices[index].size_bytes // BLOCK - blocks
        return Extent(index, self.rng.randint(0, last), blocks)


_NAME_BYTES = [byte for byte in range(1, 256) if byte != ord("/")]

RANDOM = st.integers(0, 1 << 32).map(random.Random)
"""For a whole tree; choices drawn one by one would be slow, and make small trees only."""
Described = dict[bytes, tuple[Any, ...]]


def describe(tree: Tree, *, overlay_xattrs: bool = True) -> Described:
    """A tree as values: two trees that say the same are equal."""
    first: dict[Inode, bytes] = {}
    return {
        path: (
            *_attributes(inode, overlay_xattrs),
            _extents(inode, tree),
            first.setdefault(inode, path),
        )
        for path, inode in tree.walk()
    }


def _attributes(inode: Inode, overlay_xattrs: bool) -> tuple[Any, ...]:
    xattrs = {
        n: v
        for n, v in inode.xattrs.items()
        if overlay_xattrs or not n.startswith(b"trusted.overlay.")
    }
    return (
        inode.mode,
        inode.uid,
        inode.gid,
        inode.mtime_ns,
        inode.size,
        inode.rdev,
        inode.target,
        xattrs,
    )


def _extents(inode: Inode, tree: Tree) -> list[tuple[Device | None, int, int]]:
    return [
        (
            None if extent.device == HOLE else tree.devices[extent.device],
            extent.block,
            extent.blocks,
        )
        for extent in join_extents(inode.extents)
    ]


def describe_content(tree: Tree, data: Mapping[str, bytes]) -> Described:
    """As `describe`, with the digest of each file's content in place of its extents."""
    described = describe(tree, overlay_xattrs=False)
    for path, inode in tree.walk():
        *rest, _, first = described[path]
        content = content_of(inode, tree, data) if stat.S_ISREG(inode.mode) else b""
        described[path] = (*rest, digest(content), first)
    return described


def content_of(inode: Inode, tree: Tree, data: Mapping[str, bytes]) -> bytes:
    parts = [_bytes_of(extent, tree, data) for extent in inode.extents]
    return b"".join(parts)[: inode.size]


def _bytes_of(extent: Extent, tree: Tree, data: Mapping[str, bytes]) -> bytes:
    if extent.device == HOLE:
        return bytes(extent.blocks * BLOCK)
    start = extent.block * BLOCK
    return data[tree.devices[extent.device].digest][start : start + extent.blocks * BLOCK]


def describe_directory(root: bytes) -> Described:
    """A directory on disk in the words of `describe_content`, by plain calls."""
    described: Described = {}
    first: dict[tuple[int, int], bytes] = {}
    pending = [b""]
    while pending:
        path = pending.pop()
        full = os.path.join(root, path)
        try:
            status = os.lstat(full)
        except FileNotFoundError:
            continue  # overlayfs lists whiteouts of directories that are in one layer only
        described[path] = _described_file(full, status, path, first)
        if stat.S_ISDIR(status.st_mode):
            pending += [os.path.join(path, name) for name in os.listdir(full)]
    return _with_least_names(described)


def _described_file(
    full: bytes, status: os.stat_result, path: bytes, first: dict[tuple[int, int], bytes]
) -> tuple[Any, ...]:
    mode = status.st_mode
    regular = stat.S_ISREG(mode)
    device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    names = os.listxattr(full, follow_symlinks=False)
    kept = [n for n in names if not n.startswith("trusted.overlay.")]
    content = b""
    if regular:
        with open(full, "rb") as file:
            content = file.read()
    return (
        mode,
        status.st_uid,
        status.st_gid,
        status.st_mtime_ns,
        status.st_size if regular else 0,
        status.st_rdev if device else 0,
        os.readlink(full) if stat.S_ISLNK(mode) else b"",
        {os.fsencode(n): os.getxattr(full, n, follow_symlinks=False) for n in kept},
        digest(content),
        first.setdefault((status.st_dev, status.st_ino), path),
    )


def _with_least_names(described: Described) -> Described:
    """Call each group of links by the first of its names, as `walk` would meet them."""
    order = sorted(described, key=lambda path: path.split(b"/"))
    names: dict[bytes, bytes] = {}
    for path in order:
        names.setdefault(described[path][-1], path)
    return {path: (*described[path][:-1], names[described[path][-1]]) for path in order}
