"""The part of EROFS's on-disk format that our images use; little-endian throughout.

```
0      1024  zeros
1024    128  superblock
1152    128  per data device: its slot in the device table
...          inodes of 64 bytes, the root's first, on multiples of 32; each is followed by its
             xattrs and then its inline tail or its chunk indexes
...          from the next whole block: content of directories and symbolic links that do not fit beside their inode
```

File data is elsewhere: chunk indexes point into the data devices.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from dsec.images.erofs.tree import BLOCK

UUID: Final = bytes.fromhex("d5ec0000000040008000000000000001")
"""Of every image we write, and what we know them by."""
MAGIC: Final = 0xE0F5E1E2
BLOCK_BITS: Final = 12

COMPAT_CHECKSUM: Final = 1
COMPAT_MTIME: Final = 2
INCOMPAT_CHUNKED: Final = 4
INCOMPAT_DEVICES: Final = 8

SUPER: Final = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24s")
"""Packs a `Super`."""
SUPER_AT: Final = 1024
CHECKSUM_AT: Final = SUPER_AT + 4

DEVICE: Final = struct.Struct("<64sII56s")
"""tag (the hex digits of the data's sha256), blocks, first block if all lay in one file, reserved."""
DEVICE_SLOT: Final = (SUPER_AT + SUPER.size) // DEVICE.size
MAX_IMAGE_BYTES: Final = 256 << 20
"""Some two million files. In memory, as objects, an image is about five times as large."""

MAX_DEVICES: Final = 16_000
"""The root, which follows their slots, has a nid of 16 bits."""

INODE: Final = struct.Struct("<HHHHQIIIIqII16x")
"""Packs a `DiskInode`."""
SLOT: Final = 32
"""An inode's nid is its place in the image in these; what EROFS calls meta_blkaddr is 0."""
EXTENDED: Final = 1
"""Bit of an inode's format: it has 64 bytes."""
PLAIN: Final = 0
INLINE: Final = 2
CHUNKED: Final = 4
"""Layouts, the bits of an inode's format above `EXTENDED`."""

DIRENT: Final = struct.Struct("<QHBB")
"""nid, offset of the name in its block, kind, reserved."""
KINDS: Final = {
    0o100000: 1,
    0o040000: 2,
    0o020000: 3,
    0o060000: 4,
    0o010000: 5,
    0o140000: 6,
    0o120000: 7,
}
"""The kind in a directory entry, by the type bits of the mode."""
MAX_NAME: Final = 255
MAX_TARGET: Final = BLOCK - 1

CHUNK: Final = struct.Struct("<HHI")
"""advice, device (from 1), block."""
CHUNK_INDEXES: Final = 0x20
"""Bit of a chunk format: indexes of 8 bytes. Below it: log2 of the blocks of a chunk."""
MAX_CHUNK_BITS: Final = 31
NO_BLOCK: Final = 0xFFFFFFFF

XATTR_HEADER: Final = 12
XATTR: Final = struct.Struct("<BBH")
"""length of the name without its prefix, which prefix, length of the value."""
XATTR_PREFIXES: Final = {
    b"user.": 1,
    b"system.posix_acl_access": 2,
    b"system.posix_acl_default": 3,
    b"trusted.": 4,
    b"security.": 6,
}
MAX_XATTR_VALUE: Final = 0xFFFF
MAX_XATTRS: Final = XATTR_HEADER + 4 * 0xFFFE
"""Bytes of all xattrs of an inode."""


class Super(NamedTuple):
    """The superblock, by the kernel's names."""

    magic: int = MAGIC
    checksum: int = 0
    feature_compat: int = COMPAT_CHECKSUM | COMPAT_MTIME
    blkszbits: int = BLOCK_BITS
    sb_extslots: int = 0
    root_nid: int = 0
    inos: int = 0
    build_time: int = 0
    build_time_nsec: int = 0
    blocks: int = 0
    meta_blkaddr: int = 0
    xattr_blkaddr: int = 0
    uuid: bytes = UUID
    volume_name: bytes = bytes(16)
    feature_incompat: int = INCOMPAT_CHUNKED
    compression: int = 0
    extra_devices: int = 0
    devt_slotoff: int = 0
    dirblkbits: int = 0
    xattr_prefix_count: int = 0
    xattr_prefix_start: int = 0
    packed_nid: int = 0
    reserved: bytes = bytes(24)

    @classmethod
    def of(
        cls, *, root_nid: int, inodes: int, blocks: int, devices: int, checksum: int = 0
    ) -> Super:
        """What varies from image to image."""
        return cls(
            checksum=checksum,
            root_nid=root_nid,
            inos=inodes,
            blocks=blocks,
            feature_incompat=INCOMPAT_CHUNKED | (INCOMPAT_DEVICES if devices else 0),
            extra_devices=devices,
            devt_slotoff=DEVICE_SLOT if devices else 0,
        )


class DiskInode(NamedTuple):
    """An extended inode, without the 16 reserved bytes at its end."""

    format: int
    xattr_icount: int
    mode: int
    reserved: int
    size: int
    info: int
    """First block of the content, device number or chunk format, by kind and layout."""
    ino: int
    uid: int
    gid: int
    mtime: int
    mtime_nsec: int
    nlink: int


def align(value: int, unit: int) -> int:
    """The next multiple of `unit`, which is a power of two."""
    return (value + unit - 1) & -unit


def checksum(image: bytes | bytearray) -> int:
    """The superblock's checksum: of what follows it in its block too, its own field being zero."""
    block = bytearray(image[SUPER_AT:BLOCK])
    block[4:8] = bytes(4)
    crc = 0xFFFFFFFF
    for byte in block:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


_CRC32C: Final = [_table_entry(byte) for byte in range(256)]


def encode_rdev(major: int, minor: int) -> int | None:
    """A device number as the kernel keeps it in 32 bits, or None if it does not fit."""
    if major >= 1 << 12 or minor >= 1 << 20:
        return None
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def decode_rdev(value: int) -> tuple[int, int]:
    """Major and minor number."""
    return (value >> 8) & 0xFFF, (value & 0xFF) | ((value >> 12) & 0xFFF00)
