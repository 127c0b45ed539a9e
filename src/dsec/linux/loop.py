"""Loop devices: a file as a block device, for as long as somebody uses the device."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_CONTROL = "/dev/loop-control"
_GET_FREE, _CONFIGURE, _SET_CAPACITY = 0x4C82, 0x4C0A, 0x4C07
_AUTOCLEAR, _DIRECT_IO = 4, 16
_CONFIG = struct.Struct("=II52xI176x64x")
"""`struct loop_config`: file, block size, and the flags of its `struct loop_info64`."""
_TRIES = 100
"""A free device may be taken by somebody else before it is ours."""


@contextlib.contextmanager
def attached(file: Path, block_size: int) -> Iterator[Path]:
    """A block device that is this file, writable; held while the body runs. Blocks.

    It stays for as long as it is mounted, and goes by itself with its last user: nothing is left
    when this process is killed. Its reads and writes bypass the page cache where the file system
    below allows it, so that nothing is cached twice.

    Args:
        file: what it is made of.
        block_size: of the device, bytes.

    Raises:
        OSError: naming the call and the device or file; ENOSPC from LOOP_CTL_GET_FREE when there
            are no more devices.
    """
    backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        device, descriptor = _configured(backing, block_size)
    finally:
        os.close(backing)
    try:
        yield device
    finally:
        os.close(descriptor)


def device_of(mounted: Path) -> Path:
    """The device a file system is mounted from. Raises OSError: it is not there."""
    number = mounted.stat().st_dev
    about = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return Path("/dev", about.resolve(strict=True).name)


def take_size(device: Path) -> None:
    """Have a device be as large as its file is now. Raises OSError: naming the call and the device."""
    descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _SET_CAPACITY)
    except OSError as exc:
        raise OSError(exc.errno, f"LOOP_SET_CAPACITY: {exc.strerror}", str(device)) from None
    finally:
        os.close(descriptor)


def _configured(backing: int, block_size: int) -> tuple[Path, int]:
    for _ in range(_TRIES):
        device = Path(f"/dev/loop{_free_number()}")
        descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            _configure(descriptor, backing, block_size, device)
        except BaseException as exc:
            os.close(descriptor)
            if isinstance(exc, OSError) and exc.errno == errno.EBUSY:
                continue
            raise
        return device, descriptor
    raise OSError(errno.EBUSY, f"LOOP_CONFIGURE: taken by others {_TRIES} times", _CONTROL)


def _free_number() -> int:
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(control, _GET_FREE)
    except OSError as exc:
        raise OSError(exc.errno, f"LOOP_CTL_GET_FREE: {exc.strerror}", _CONTROL) from None
    finally:
        os.close(control)


def _configure(device: int, backing: int, block_size: int, named: Path) -> None:
    config = _CONFIG.pack(backing, block_size, _AUTOCLEAR | _DIRECT_IO)
    try:
        fcntl.ioctl(device, _CONFIGURE, config)
    except OSError as exc:
        raise OSError(exc.errno, f"LOOP_CONFIGURE: {exc.strerror}", str(named)) from None
