"""What each inode of a tree needs in an EROFS image, and in which order they come.

The entries of a directory follow each other, so that listing it touches few blocks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsec.images.erofs import format as fmt
from dsec.images.erofs.tree import BLOCK, HOLE, Device, Extent, Inode, Tree, join_extents

_MAX_INDEXES = 1 << 22
"""Of one file's chunks: 32 MiB."""


class Misfit(Exception):
    """An inode that EROFS cannot hold."""

    def __init__(self, inode: Inode | None, why: str) -> None:
        super().__init__(why)
        self.inode = inode


@dataclass(slots=True, eq=False)
class Node:
    """An inode on its way into the image."""

    inode: Inode
    parent: Node | None
    """The directory it was found in first; None for the root."""
    links: int = 0
    size: int = 0
    """What `i_size` says."""
    layout: int = fmt.PLAIN
    info: int = 0
    xattrs: bytes = b""
    indexes: bytes = b""
    groups: list[list[bytes]] = field(default_factory=list)
    """Of a directory: the names in each of its blocks."""
    blocks: int = 0
    """Outside the metadata area."""
    place: int = 0
    """In the image, in bytes."""

    @property
    def nid(self) -> int:
        """By which directories know it."""
        return self.place // fmt.SLOT

    @property
    def length(self) -> int:
        """In the metadata area, in bytes."""
        head = fmt.INODE.size + len(self.xattrs)
        if self.indexes:
            return fmt.align(head, 8) + len(self.indexes)
        return head + (self.size % BLOCK if self.layout == fmt.INLINE else 0)


# -- number ------------------------------------------------------------------------------------


def number(tree: Tree) -> dict[Inode, Node]:
    """Every inode once, in the order they will have in the image; links are counted.

    Raises:
        Misfit: EROFS cannot hold it.
    """
    root = Node(tree.root, None)
    nodes = {tree.root: root}
    pending = [root]
    while pending:
        pending.extend(reversed(_number_children(pending.pop(), nodes)))
    return nodes


def _number_children(directory: Node, nodes: dict[Inode, Node]) -> list[Node]:
    """Add what a directory holds; returns the directories among it."""
    below: list[Node] = []
    children = directory.inode.children
    for name in sorted(children):
        _check_name(name, directory.inode)
        inode = children[name]
        node = nodes.get(inode)
        if node is None:
            node = nodes[inode] = Node(inode, directory)
            if inode.is_dir:
                below.append(node)
        elif inode.is_dir:
            raise Misfit(inode, "a directory with two names")
        node.links += 1
    directory.links = 2 + len(below)
    return below


def _check_name(name: bytes, directory: Inode) -> None:
    if not 0 < len(name) <= fmt.MAX_NAME or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise Misfit(directory, f"no file can be named {name[:300]!r}")


# -- measure -----------------------------------------------------------------------------------


def measure(node: Node, devices: list[Device]) -> None:
    """Find out all the inode will need, but for its place.

    Raises:
        Misfit: EROFS cannot hold it.
    """
    inode = node.inode
    _check_numbers(inode)
    if inode.xattrs:
        node.xattrs = _encode_xattrs(inode)
    kind = stat.S_IFMT(inode.mode)
    if kind == stat.S_IFREG:
        _measure_file(node, devices)
    elif kind == stat.S_IFDIR:
        node.groups = _group(sorted([*inode.children, b".", b".."]))
        _measure_content(node, BLOCK * (len(node.groups) - 1) + _group_size(node.groups[-1]))
    elif kind == stat.S_IFLNK:
        _measure_target(node)
    elif kind in fmt.KINDS:
        node.info = _encode_rdev(inode)
    else:
        raise Misfit(inode, f"it is of no known kind (mode {inode.mode:o})")


def _check_numbers(inode: Inode) -> None:
    ids_fit = 0 <= inode.uid < 1 << 32 and 0 <= inode.gid < 1 << 32
    if not (ids_fit and 0 <= inode.mode < 1 << 16 and 0 <= inode.size < 1 << 63):
        raise Misfit(inode, "its owner, mode or size is out of range")
    if not -(1 << 63) <= inode.mtime_ns // 10**9 < 1 << 63:
        raise Misfit(inode, "its time is out of range")


def _encode_rdev(inode: Inode) -> int:
    if not (stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode)):
        return 0
    value = fmt.encode_rdev(os.major(inode.rdev), os.minor(inode.rdev))
    if value is None:
        raise Misfit(inode, "its device number has more than 32 bits")
    return value


def _measure_target(node: Node) -> None:
    target = node.inode.target
    if not 0 < len(target) <= fmt.MAX_TARGET or b"\0" in target:
        raise Misfit(node.inode, "a symbolic link's target has 1 to 4095 bytes and no NUL")
    _measure_content(node, len(target))


def _measure_content(node: Node, size: int) -> None:
    """Of a directory or symbolic link: its last part beside the inode if one block has room."""
    node.size = size
    tail = size % BLOCK
    if tail and fmt.INODE.size + len(node.xattrs) + tail <= BLOCK:
        node.layout = fmt.INLINE
        node.blocks = size // BLOCK
    else:
        node.blocks = fmt.align(size, BLOCK) // BLOCK


def _group(names: Iterable[bytes]) -> list[list[bytes]]:
    """Sorted names cut into what a directory's blocks hold: a block has whole entries only."""
    groups: list[list[bytes]] = []
    room = 0
    for name in names:
        need = fmt.DIRENT.size + len(name)
        if need > room:
            groups.append([])
            room = BLOCK
        groups[-1].append(name)
        room -= need
    return groups


def _group_size(names: list[bytes]) -> int:
    return fmt.DIRENT.size * len(names) + sum(map(len, names))


def _encode_xattrs(inode: Inode) -> bytes:
    parts = [bytes(fmt.XATTR_HEADER)]
    for name in sorted(inode.xattrs):
        value = inode.xattrs[name]
        prefix, index = _prefix_of(name, inode)
        suffix = name[len(prefix) :]
        if len(suffix) > fmt.MAX_NAME or len(value) > fmt.MAX_XATTR_VALUE:
            raise Misfit(inode, f"its attribute {name[:300]!r} is too long")
        entry = fmt.XATTR.pack(len(suffix), index, len(value)) + suffix + value
        parts += entry, bytes(-len(entry) % 4)
    encoded = b"".join(parts)
    if len(encoded) > fmt.MAX_XATTRS:
        raise Misfit(inode, "it has more than 256 KiB of attributes")
    return encoded


def _prefix_of(name: bytes, inode: Inode) -> tuple[bytes, int]:
    for prefix, index in fmt.XATTR_PREFIXES.items():
        if name == prefix or (prefix.endswith(b".") and name.startswith(prefix)):
            return prefix, index
    raise Misfit(inode, f"attributes like {name[:300]!r} have no place in EROFS")


def _measure_file(node: Node, devices: list[Device]) -> None:
    inode = node.inode
    node.size = inode.size
    extents = join_extents(inode.extents)
    if sum(extent.blocks for extent in extents) != fmt.align(inode.size, BLOCK) // BLOCK:
        raise Misfit(inode, "its extents do not cover its size")
    if not extents:
        return
    for extent in extents:
        _check_extent(extent, inode, devices)
    bits = _chunk_bits(extents)
    node.layout = fmt.CHUNKED
    node.info = fmt.CHUNK_INDEXES | bits
    node.indexes = _encode_indexes(extents, bits, inode)


def _check_extent(extent: Extent, inode: Inode, devices: list[Device]) -> None:
    if extent.device == HOLE:
        return
    if not 0 <= extent.device < len(devices):
        raise Misfit(inode, "its data is in no device")
    end = extent.block + extent.blocks
    if extent.block < 0 or end * BLOCK > devices[extent.device].size_bytes:
        raise Misfit(inode, "its data is outside its device")


def _chunk_bits(extents: list[Extent]) -> int:
    """log2 of the largest chunk, in blocks, such that every extent begins on one."""
    if len(extents) == 1:
        return min((extents[0].blocks - 1).bit_length(), fmt.MAX_CHUNK_BITS)
    start = starts = 0
    for extent in extents[:-1]:
        start += extent.blocks
        starts |= start
    return min((starts & -starts).bit_length() - 1, fmt.MAX_CHUNK_BITS)


def _encode_indexes(extents: list[Extent], bits: int, inode: Inode) -> bytes:
    if sum(extent.blocks for extent in extents) >> bits > _MAX_INDEXES:
        raise Misfit(inode, "it is too large and its holes are too many")
    parts: list[bytes] = []
    for extent in extents:
        chunks = ((extent.blocks - 1) >> bits) + 1
        if extent.device == HOLE:
            parts.append(fmt.CHUNK.pack(0, 0, fmt.NO_BLOCK) * chunks)
            continue
        starts = range(extent.block, extent.block + (chunks << bits), 1 << bits)
        parts += [fmt.CHUNK.pack(0, extent.device + 1, start) for start in starts]
    return b"".join(parts)
