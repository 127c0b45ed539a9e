"""fanotify's pre-content events: the kernel asks before it reads a marked file.

Whoever holds a group's last descriptor and closes it lets all readers through: what was not
written yet reads as zeros. Hold it for as long as anything that reads the files is mounted.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
from pathlib import Path
from typing import Final, NamedTuple

_CLOEXEC, _NONBLOCK, _PRE_CONTENT = 0x1, 0x2, 0x8
_UNLIMITED_QUEUE, _UNLIMITED_MARKS = 0x10, 0x20
_MARK_ADD, _MARK_EVICTABLE = 0x1, 0x200
_PRE_ACCESS = 0x100000
_ALLOW, _DENY = 1, 2
_RANGE = 6
_NO_DESCRIPTOR = -1

_HANDLE = struct.Struct("=Ii")
_MARK = re.compile(r"^fanotify ino:.* fhandle-type:(\w+) f_handle:(\w+)", re.MULTILINE)
_EVENT = struct.Struct("=IBBHQii")
_INFO = struct.Struct("=BxH")
_RANGE_RECORD = struct.Struct("=BxHIQQ")
_RESPONSE = struct.Struct("=iI")
_BUFFER_BYTES = 16384

MAX_DESCRIPTORS: Final = 65536
"""What a process that takes events limits itself to: an unanswered event is known by the number
of its descriptor in that process, and its successor must deny them all."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fanotify_init.argtypes = [ctypes.c_uint, ctypes.c_uint]
_libc.fanotify_mark.argtypes = [
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_char_p,
]
_libc.open_by_handle_at.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int]


class Event(NamedTuple):
    """Somebody waits to read."""

    descriptor: int
    """Of the file; the event's name too. Close it after the answer."""
    pid: int
    offset: int
    length: int
    """0: unknown, take it for all."""


def open_group() -> int:
    """A group for pre-content events, not blocking, with a queue that does not overflow.

    Raises:
        OSError: EINVAL before Linux 6.14.
    """
    flags = _PRE_CONTENT | _CLOEXEC | _NONBLOCK | _UNLIMITED_QUEUE | _UNLIMITED_MARKS
    files = os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE
    group = int(_libc.fanotify_init(flags, files))
    if group < 0:
        raise _failed("fanotify_init", "pre-content")
    return group


def mark_file(group: int, descriptor: int) -> None:
    """Ask before each read of this file by those who open it from now on.

    The mark goes when nobody has the file open any more. Marking again is harmless.

    Raises:
        OSError: EOPNOTSUPP on a file system that cannot (tmpfs, overlayfs).
    """
    what = _MARK_ADD | _MARK_EVICTABLE
    if _libc.fanotify_mark(group, what, _PRE_ACCESS, descriptor, None) != 0:
        raise _failed("fanotify_mark", f"/proc/self/fd/{descriptor}")


def _failed(call: str, path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}", path)


def read_events(group: int) -> list[Event]:
    """The events there are now; each must be answered."""
    try:
        data = os.read(group, _BUFFER_BYTES)
    except BlockingIOError:
        return []
    events: list[Event] = []
    at = 0
    while at < len(data):
        length, _, _, skip, _, descriptor, pid = _EVENT.unpack_from(data, at)
        if descriptor != _NO_DESCRIPTOR:
            events.append(Event(descriptor, pid, *_span(data[at + skip : at + length])))
        at += length
    return events


def _span(records: bytes) -> tuple[int, int]:
    at = 0
    while at < len(records):
        kind, size = _INFO.unpack_from(records, at)
        if kind == _RANGE:
            *_, offset, length = _RANGE_RECORD.unpack_from(records, at)
            return offset, length
        at += size
    return 0, 0


def allow(group: int, event: int) -> None:
    """Let the reader read."""
    _respond(group, event, _ALLOW)


def deny(group: int, event: int) -> None:
    """Let the reader's read fail with EIO."""
    _respond(group, event, _DENY | errno.EIO << 24)


def _respond(group: int, event: int, response: int) -> bool:
    try:
        os.write(group, _RESPONSE.pack(event, response))
    except FileNotFoundError:
        return False  # the reader was killed
    return True


def deny_unanswered(group: int, limit: int = MAX_DESCRIPTORS) -> int:
    """Deny all that a dead process took and did not answer. Before any new event is taken.

    Returns:
        How many there were.
    """
    return sum(_deny_all(group, event) for event in range(limit))


def _deny_all(group: int, event: int) -> int:
    """How many events had this number: two processes that died may both have used it."""
    count = 0
    while _respond(group, event, _DENY | errno.EIO << 24):
        count += 1
    return count


def is_in_use(group: int, directory: int) -> bool:
    """Whether any process or mount of this host has a marked file open. In doubt it has.

    Args:
        group: whose marks.
        directory: a descriptor of any directory on the file system of the files.
    """
    marks = _MARK.findall(Path(f"/proc/self/fdinfo/{group}").read_text())
    return any(_is_open(directory, int(kind, 16), bytes.fromhex(name)) for kind, name in marks)


def _is_open(directory: int, kind: int, name: bytes) -> bool:
    handle = _HANDLE.pack(len(name), kind) + name
    file = int(_libc.open_by_handle_at(directory, handle, os.O_RDONLY | os.O_CLOEXEC))
    if file < 0:
        return True  # of another file system, for one
    try:
        # The kernel leases a file for writing to nobody but who alone has it open. That a mount has
        # it open, perhaps one that is detached or in another namespace, cannot be seen otherwise.
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def fanotify_available(directory: Path) -> str:
    """Why files of this directory cannot be served through fanotify; "" if they can."""
    try:
        group = open_group()
    except OSError as error:
        return f"{error.strerror}: it takes Linux 6.14 and root"
    try:
        return _try_mark(group, directory)
    finally:
        os.close(group)


def _try_mark(group: int, directory: Path) -> str:
    try:
        probe = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    try:
        mark_file(group, probe)
    except OSError as error:
        return f"{directory}: {error.strerror}: it takes ext4, XFS or Btrfs, and Linux 6.14"
    finally:
        os.close(probe)
    return ""
