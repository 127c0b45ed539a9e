"""Mounts: typed wrappers over mount(2) and umount2(2), and what /proc/self/mountinfo says.

`mount(8)` is never used: for an EROFS image in a file it would make a loop device, which a
file-backed mount does not need.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path


class MountFlag(IntFlag):
    """Flags of mount(2)."""

    RDONLY = 1
    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    NOATIME = 1024
    BIND = 4096
    REC = 16384
    PRIVATE = 1 << 18


_MNT_DETACH = 2
_OPTIONS_BYTES = 4000
_UMOUNT_NOFOLLOW = 8
_CLONE_NEWNS = 0x00020000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    mount_id: int
    parent_id: int
    root: str
    """The directory of the file system that is its root here."""
    target: str
    fstype: str
    source: str
    options: str


def _check(result: int, call: str, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", path)


def mount(source: str, target: Path, fstype: str, flags: MountFlag, options: str = "") -> None:
    """Mount by the system call of that name.

    Raises:
        OSError: naming the call and the target.
    """
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        fstype.encode(),
        int(flags),
        os.fsencode(options) if options else None,
    )
    _check(result, f"mount {fstype or 'flags'} {source}", str(target))


def mount_erofs(image: Path, target: Path, devices: Sequence[Path] = ()) -> None:
    """Mount an EROFS image that is a file, read-only, without a loop device.

    Args:
        image: the metadata, or the whole image.
        target: an existing directory.
        devices: data devices in the order mkfs recorded them. An image made with `--blobdev`
            mounted without them *succeeds* and reads garbage: give them all. They are looked at: one
            on FUSE waits for whoever serves it. The node's filler bounds that: its worker is
            replaced when it hangs, and with its keeper gone the answer is ENOTCONN (spec/filler.md).

    Raises:
        OSError: naming the call and the target; EINVAL for a wrong count of devices.
    """
    missing = next((device for device in devices if not device.exists()), None)
    if missing is not None:
        raise FileNotFoundError(2, "mount erofs: data device missing", str(missing))
    flags = MountFlag.RDONLY | MountFlag.NODEV | MountFlag.NOSUID
    with contextlib.ExitStack() as stack:
        options = ",".join(f"device={name}" for name in _short_names(devices, stack))
        mount(str(image), target, "erofs", flags, options)


def _short_names(devices: Sequence[Path], stack: contextlib.ExitStack) -> list[str]:
    """Names for mount options, which hold one page and no commas in a name."""
    names = [str(device) for device in devices]
    if sum(map(len, names)) + 8 * len(names) < _OPTIONS_BYTES and not any("," in n for n in names):
        return names
    descriptors = [os.open(device, os.O_RDONLY | os.O_CLOEXEC) for device in devices]
    for descriptor in descriptors:
        stack.callback(os.close, descriptor)
    return [f"/proc/self/fd/{descriptor}" for descriptor in descriptors]


def mount_overlay_view(lowers: Sequence[str], target: Path) -> None:
    """Mount a read-only overlay of at least two directories, topmost first.

    Raises:
        OSError: naming the call and the target.
    """
    if any(":" in lower or "," in lower or "\\" in lower for lower in lowers):
        raise OSError(22, "mount overlay: a layer path may hold none of : , \\", str(target))
    options = f"lowerdir={':'.join(lowers)}"
    mount("overlay", target, "overlay", MountFlag.RDONLY | MountFlag.NODEV, options)


def unshare_mounts() -> None:
    """Give this process (a single-threaded child) mounts of its own, which die with it.

    Raises:
        OSError: naming the call.
    """
    _check(_libc.unshare(_CLONE_NEWNS), "unshare CLONE_NEWNS", "/")
    mount("none", Path("/"), "", MountFlag.REC | MountFlag.PRIVATE)


def umount(target: Path, *, detach: bool = False) -> None:
    """Unmount; with `detach` at once for new users and in full when the last one leaves.

    Raises:
        OSError: naming the call and the target; EBUSY while in use, EINVAL if not mounted.
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if detach else 0)
    _check(_libc.umount2(os.fsencode(target), flags), "umount2", str(target))


_ESCAPE = re.compile(rb"\\([0-7]{3})")


def _unescape(field: bytes) -> str:
    """Undo the kernel's octal escapes (blank, tab, newline, backslash, #)."""
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))


def parse_mountinfo(text: bytes) -> list[Mount]:
    """Read the lines of a mountinfo file, in mount order.

    Raises:
        ValueError: a line is not one of mountinfo.
    """
    return [_parse_line(line) for line in text.splitlines() if line]


def _parse_line(line: bytes) -> Mount:
    before, _, after = line.partition(b" - ")
    left, right = before.split(b" "), after.split(b" ")
    if len(left) < 6 or len(right) < 2:
        raise ValueError(f"not a line of mountinfo: {line!r}")
    return Mount(
        mount_id=int(left[0]),
        parent_id=int(left[1]),
        root=_unescape(left[3]),
        target=_unescape(left[4]),
        options=_unescape(left[5]),
        fstype=_unescape(right[0]),
        source=_unescape(right[1]),
    )


def list_mounts() -> list[Mount]:
    """All mounts this process sees, oldest first.

    Raises:
        OSError: /proc is not mounted.
    """
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())


def mount_at(target: Path) -> Mount | None:
    """The topmost mount at exactly this path (absolute, without symbolic links), if any."""
    wanted = str(target)
    return next((m for m in reversed(list_mounts()) if m.target == wanted), None)


def is_mounted(target: Path) -> bool:
    """Whether something is mounted at exactly this path."""
    return mount_at(target) is not None


def mounts_under(root: Path) -> list[Mount]:
    """Mounts at or below a path, in the order they must be unmounted."""
    prefix = f"{root}/"
    found = [m for m in list_mounts() if m.target == str(root) or m.target.startswith(prefix)]
    return found[::-1]
