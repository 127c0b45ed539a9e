"""Advice to the kernel about another process's memory."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

_SYS_PROCESS_MADVISE = 440
"""The same on every architecture."""
_MADV_WILLNEED = 3
MAX_RANGES = 1024
"""Of one call (IOV_MAX)."""


class Range(NamedTuple):
    """A part of an address space, on whole pages."""

    start: int
    size_bytes: int


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def will_need(descriptor: int, ranges: Sequence[Range]) -> int:
    """Have parts of a process's memory read in that are in swap or in files. Blocks a little.

    Args:
        descriptor: of the process (pidfd).
        ranges: at most `MAX_RANGES`.

    Returns:
        Bytes advised on.

    Raises:
        OSError: the process is gone (ESRCH), or it may not be advised on.
    """
    # Of struct iovec, whose two fields are an address and a size.
    vector = (ctypes.c_size_t * (2 * len(ranges)))(*itertools.chain.from_iterable(ranges))
    done: int = _syscall(
        ctypes.c_long(_SYS_PROCESS_MADVISE),
        ctypes.c_int(descriptor),
        vector,
        ctypes.c_size_t(len(ranges)),
        ctypes.c_int(_MADV_WILLNEED),
        ctypes.c_uint(0),
    )
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"process_madvise: {os.strerror(number)}")
    return done
