"""A metadata image back into a tree. Only what `write` makes is understood.

An image may come from a store, so nothing in it is believed. We say every byte once; so the bytes
the reader takes are counted against the image's length, and an image in which many inodes share
the same bytes ends the reading, not the memory.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dsec.base.errors import InternalError
from dsec.images.erofs import format as fmt
from dsec.images.erofs.tree import BLOCK, HOLE, Device, Extent, Inode, Tree, join_extents

_TAG = re.compile(rb"[0-9a-f]{64}")
_PREFIXES = {index: prefix for prefix, index in fmt.XATTR_PREFIXES.items()}
_DEVICE_KINDS = (stat.S_IFCHR, stat.S_IFBLK)


def read_image(image: Path) -> Tree:
    """Read a metadata image. Blocks.

    Raises:
        InternalError: it is not one that `write_image` made, or is damaged; names the file.
        OSError: it cannot be read.
    """
    with image.open("rb") as file:
        return read_opened(file, image)


def read_opened(file: IO[bytes], image: Path) -> Tree:
    """The same for who may no longer open it; `image` is its name, for people.

    Raises:
        InternalError, OSError: as `read_image`.
    """
    try:
        return _Reader(_load(file)).read()
    except _Damage as damage:
        why = f"{image} is damaged, or no metadata image of ours: {damage}"
        raise InternalError(why, path=str(image)) from None


def _load(file: IO[bytes]) -> bytes:
    if os.fstat(file.fileno()).st_size > fmt.MAX_IMAGE_BYTES:
        raise _Damage("it is larger than 256 MiB")
    return file.read()


class _Damage(Exception):
    """Something in the image is not as we write it."""


class _Reader:
    """One image on its way into a tree."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        self._budget = len(image)
        self._devices: list[Device] = []
        self._inodes: dict[int, Inode] = {}
        self._links: dict[int, int] = {}
        """By nid: names the inode should have less those found."""
        self._listings: dict[int, bytes] = {}
        """By nid: content of directories whose entries are still to be read."""

    def read(self) -> Tree:
        """All of it.

        Raises:
            _Damage: it is not as we write it.
        """
        root = self._read_super()
        if not self._inode(root).is_dir:
            raise _Damage("its root is no directory")
        pending = [(root, root)]
        while pending:
            pending += self._read_directory(*pending.pop())
        if any(self._links.values()):
            raise _Damage("an inode's count of links is wrong")
        return Tree(self._inodes[root], self._devices)

    def _take(self, start: int, length: int) -> bytes:
        """Some bytes, at most as many in all as the image has."""
        self._budget -= length
        if start + length > len(self._image):
            raise _Damage("something lies outside it")
        if self._budget < 0:
            raise _Damage("inodes overlap")
        return self._image[start : start + length]

    # -- superblock --------------------------------------------------------------------------------

    def _read_super(self) -> int:
        """Check the superblock and read the devices; returns the root's nid."""
        if len(self._image) < BLOCK:
            raise _Damage("it has no superblock")
        found = fmt.Super._make(fmt.SUPER.unpack_from(self._image, fmt.SUPER_AT))
        if found != _expected(found):
            raise _Damage("its superblock is not of ours")
        if found.checksum != fmt.checksum(self._image):
            raise _Damage("its checksum is wrong")
        if found.blocks * BLOCK != len(self._image):
            raise _Damage("its length is wrong")
        self._budget -= fmt.SUPER_AT + fmt.SUPER.size
        self._read_devices(found.extra_devices)
        return found.root_nid

    def _read_devices(self, count: int) -> None:
        table = self._take(fmt.DEVICE_SLOT * fmt.DEVICE.size, count * fmt.DEVICE.size)
        for tag, blocks, _, _ in fmt.DEVICE.iter_unpack(table):
            if not _TAG.fullmatch(tag):
                raise _Damage("a device has no digest")
            self._devices.append(Device(f"sha256:{tag.decode()}", blocks * BLOCK))

    # -- directories -------------------------------------------------------------------------------

    def _read_directory(self, nid: int, parent: int) -> list[tuple[int, int]]:
        """Read a directory's entries; returns the directories among them, each with its parent."""
        directory = self._inodes[nid]
        below: list[tuple[int, int]] = []
        own = {b".": nid, b"..": parent}
        last = b""
        for name, child, kind in _entries(self._listings.pop(nid)):
            if name <= last:
                raise _Damage("a directory's names are not in order")
            last = name
            if name in own:
                if own.pop(name) != child:
                    raise _Damage("a directory has another's name")
                continue
            known = child in self._inodes
            inode = directory.children[name] = self._inode(child)
            if fmt.KINDS[stat.S_IFMT(inode.mode)] != kind:
                raise _Damage("a directory has the wrong kind for a name")
            if not inode.is_dir:
                self._links[child] -= 1
            elif known:
                raise _Damage("a directory has two names")
            else:
                below.append((child, nid))
        if own:
            raise _Damage("a directory lacks . or ..")
        self._links[nid] -= 2 + len(below)
        return below

    # -- inodes ------------------------------------------------------------------------------------

    def _inode(self, nid: int) -> Inode:
        """The inode of that number, read once."""
        if (found := self._inodes.get(nid)) is not None:
            return found
        start = nid * fmt.SLOT
        on_disk = fmt.DiskInode._make(fmt.INODE.unpack(self._take(start, fmt.INODE.size)))
        if not on_disk.format & fmt.EXTENDED or on_disk.mtime_nsec >= 10**9:
            raise _Damage("an inode is not of ours")
        mtime_ns = on_disk.mtime * 10**9 + on_disk.mtime_nsec
        inode = Inode(on_disk.mode, on_disk.uid, on_disk.gid, mtime_ns)
        after = start + fmt.INODE.size
        if on_disk.xattr_icount:
            length = fmt.XATTR_HEADER + 4 * (on_disk.xattr_icount - 1)
            inode.xattrs = _xattrs(self._take(after, length))
            after += length
        self._inodes[nid] = inode
        self._links[nid] = on_disk.nlink
        place = _Place(on_disk.format >> 1, on_disk.size, on_disk.info, after)
        self._read_kind(nid, place)
        return inode

    def _read_kind(self, nid: int, place: _Place) -> None:
        """Read what only an inode of its kind has."""
        inode = self._inodes[nid]
        kind = stat.S_IFMT(inode.mode)
        if kind == stat.S_IFREG:
            inode.size = place.size
            inode.extents = self._extents(place)
        elif kind == stat.S_IFDIR:
            self._listings[nid] = self._content(place)
        elif kind == stat.S_IFLNK:
            inode.target = self._content(place)
            if not inode.target or b"\0" in inode.target or place.size > fmt.MAX_TARGET:
                raise _Damage("a symbolic link has no proper target")
        elif kind not in fmt.KINDS or place.size:
            raise _Damage("an inode is of no known kind")
        elif kind in _DEVICE_KINDS:
            inode.rdev = os.makedev(*fmt.decode_rdev(place.info))

    def _content(self, place: _Place) -> bytes:
        """Of a directory or symbolic link."""
        if place.layout == fmt.PLAIN:
            return self._take(place.info * BLOCK, place.size)
        if place.layout != fmt.INLINE:
            raise _Damage("an inode has a layout that is not of ours")
        tail = place.size % BLOCK
        apart = self._take(place.info * BLOCK, place.size - tail)
        return apart + self._take(place.after, tail)

    def _extents(self, place: _Place) -> list[Extent]:
        if not place.size:
            return []
        blocks = fmt.align(place.size, BLOCK) // BLOCK
        bits = place.info & fmt.MAX_CHUNK_BITS
        if place.layout != fmt.CHUNKED or place.info != fmt.CHUNK_INDEXES | bits:
            raise _Damage("a file has a layout that is not of ours")
        chunks = ((blocks - 1) >> bits) + 1
        table = self._take(fmt.align(place.after, 8), fmt.CHUNK.size * chunks)
        return join_extents(
            self._extent(device, block, min(1 << bits, blocks - (number << bits)))
            for number, (_, device, block) in enumerate(fmt.CHUNK.iter_unpack(table))
        )

    def _extent(self, device: int, block: int, blocks: int) -> Extent:
        if block == fmt.NO_BLOCK:
            return Extent(HOLE, 0, blocks)
        if not 0 < device <= len(self._devices):
            raise _Damage("a file's data is in no device")
        if (block + blocks) * BLOCK > self._devices[device - 1].size_bytes:
            raise _Damage("a file's data is outside its device")
        return Extent(device - 1, block, blocks)


def _expected(found: fmt.Super) -> fmt.Super:
    """The superblock we would have written."""
    return fmt.Super.of(
        checksum=found.checksum,
        root_nid=found.root_nid,
        inodes=found.inos,
        blocks=found.blocks,
        devices=found.extra_devices,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an inode's content is."""

    layout: int
    size: int
    info: int
    after: int
    """The first byte behind inode and xattrs."""


def _entries(listing: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, nid and kind of all entries of a directory."""
    for start in range(0, len(listing), BLOCK):
        yield from _block_entries(listing[start : start + BLOCK])


def _block_entries(block: bytes) -> Iterator[tuple[bytes, int, int]]:
    end = int.from_bytes(block[8:10], "little")
    if not fmt.DIRENT.size <= end <= len(block) or end % fmt.DIRENT.size:
        raise _Damage("a directory's block has no proper beginning")
    entries = list(fmt.DIRENT.iter_unpack(block[:end]))
    ends = [offset for _, offset, _, _ in entries[1:]]
    ends.append(len(block.rstrip(b"\0")))
    for (nid, start, kind, _), stop in zip(entries, ends, strict=True):
        name = block[start:stop]
        if start != end or not 0 < len(name) <= fmt.MAX_NAME or b"/" in name or b"\0" in name:
            raise _Damage("a directory has a name no file can have")
        end = stop
        yield name, nid, kind


def _xattrs(encoded: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    at = fmt.XATTR_HEADER
    while at < len(encoded):
        name_length, index, value_length = fmt.XATTR.unpack_from(encoded, at)
        at += fmt.XATTR.size
        end = at + name_length + value_length
        if index not in _PREFIXES or end > len(encoded):
            raise _Damage("an inode's attributes are not as we write them")
        name = _PREFIXES[index] + encoded[at : at + name_length]
        found[name] = encoded[at + name_length : end]
        at = fmt.align(end, 4)
    return found
