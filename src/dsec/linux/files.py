"""Calls on open files that Python's own library does not have."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def punch_hole(descriptor: int, offset: int, length: int) -> None:
    """Give a range of a file back to the disk; it reads as zeros then. Blocks.

    Args:
        descriptor: open for writing.
        offset: in bytes; with `length` on whole blocks, or the edges stay allocated.
        length: in bytes; the file keeps its size even if it ends before.

    Raises:
        OSError: the file system cannot do it, or failed.
    """
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if _libc.fallocate(descriptor, mode, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"fallocate: {os.strerror(number)}")


def boot_id() -> str:
    """What tells this boot of the kernel from every other."""
    return _BOOT_ID.read_text().strip()
