"""Ext4 in a file, as a scratch disk: no journal, no reserve, all features named here.

What is on such a disk is not meant to outlive the host's uptime.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from dsec.linux import mounts
from dsec.linux.mounts import MountFlag
from dsec.linux.process import run

BLOCK_BYTES = 4096
INODE_RATIO = 8192
"""Bytes of disk per inode: the usual file is larger, and 3 % of the disk hold the inodes."""
REVISION = 1
"""Changes with what `format_image` makes."""

_FEATURES = (
    "none,extent,filetype,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,"
    "metadata_csum,64bit,dir_index,ext_attr"
)
_EXTENDED = "lazy_itable_init=1,nodiscard,root_owner=0:0"
# noinit_itable: the file's holes are zeros already, writing them would cost 3 % of the disk.
_OPTIONS = "noinit_itable,nobarrier,discard,errors=remount-ro"
_FORMAT_TIMEOUT_S = 300.0
_TRIES = 6
_TOLERANCE = 1.02
_SUPERBLOCK, _MAGIC = 1024, 0xEF53
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_MAX_KEPT_BLOCKS = 4096
_RESIZE = 0x40086610


def format_image(image: Path, usable_bytes: int) -> None:
    """Make a file an empty file system that takes this much, and at most 2 % more. Blocks.

    Args:
        image: the file; what is in it is lost.
        usable_bytes: what may be written to it.

    Raises:
        OSError: the file cannot be written.
        CommandFailed: mkfs.ext4 failed. FileNotFoundError: there is none.
    """
    size = round(usable_bytes * 1.06)
    for _ in range(_TRIES):
        _mkfs(image, size)
        spare = usable_in(image) - usable_bytes
        if 0 <= spare <= usable_bytes * (_TOLERANCE - 1):
            return
        size += usable_bytes // 128 - spare
    raise OSError(errno.EINVAL, f"no ext4 of {usable_bytes} usable bytes can be made", str(image))


def _mkfs(image: Path, size: int) -> None:
    with image.open("wb") as file:
        file.truncate(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
    argv = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", str(BLOCK_BYTES), "-I", "256"]
    argv += ["-i", str(INODE_RATIO), "-O", _FEATURES, "-E", _EXTENDED, str(image)]
    run(argv, timeout_s=_FORMAT_TIMEOUT_S)


def usable_in(image: Path) -> int:
    """Bytes that can be written to an image that is not mounted.

    Raises:
        OSError: it cannot be read, or is no ext4.
    """
    block = _superblock(image)
    blocks_low, _, free_low = struct.unpack_from("<III", block, 0x04)
    blocks_high, _, free_high = struct.unpack_from("<III", block, 0x150)
    blocks, free = blocks_high << 32 | blocks_low, free_high << 32 | free_low
    # Kept back by the kernel, for its own bookkeeping when the disk is full.
    kept = min(blocks // 50, _MAX_KEPT_BLOCKS)
    return int(free - kept) * BLOCK_BYTES


def size_of(place: Path) -> int:
    """Bytes of a file system, bookkeeping and all; of a device also while it is mounted.

    Raises:
        OSError: it cannot be read, or is no ext4.
    """
    block = _superblock(place)
    (low,), (high,) = struct.unpack_from("<I", block, 0x04), struct.unpack_from("<I", block, 0x150)
    return int(high << 32 | low) * BLOCK_BYTES


def _superblock(place: Path) -> bytes:
    with place.open("rb") as file:
        file.seek(_SUPERBLOCK)
        block = file.read(1024)
    if len(block) < 1024 or struct.unpack_from("<H", block, 0x38)[0] != _MAGIC:
        raise OSError(errno.EINVAL, "not an ext4 file system", str(place))
    return block


def mount_scratch(device: Path, target: Path) -> None:
    """Mount one of `format_image`, writable; blocks it frees are given back to what is below.

    Raises:
        OSError: naming the call and the target.
    """
    mounts.mount(str(device), target, "ext4", MountFlag.NODEV | MountFlag.NOATIME, _OPTIONS)


def grow(target: Path, size_bytes: int) -> None:
    """Have a mounted one fill its device up to this size, while it is used.

    Raises:
        OSError: naming the call and the target; EPERM: it takes CAP_SYS_RESOURCE.
    """
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _RESIZE, struct.pack("=Q", size_bytes // BLOCK_BYTES))
    except OSError as exc:
        raise OSError(exc.errno, f"EXT4_IOC_RESIZE_FS: {exc.strerror}", str(target)) from None
    finally:
        os.close(descriptor)


def give_up(target: Path) -> None:
    """End a mounted file system at once: what it has not written yet is dropped, not written.

    Raises:
        OSError: naming the call and the target.
    """
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("=I", _NO_LOG_FLUSH))
    except OSError as exc:
        raise OSError(exc.errno, f"EXT4_IOC_SHUTDOWN: {exc.strerror}", str(target)) from None
    finally:
        os.close(descriptor)
