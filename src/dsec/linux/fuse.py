"""FUSE as the kernel speaks it, for a file system of read-only files: mount, greeting, messages.

A request is a header and a body; an answer is a header with the request's number, and a body. The
layouts are those of the kernel's `fuse.h`, protocol 7.40, in host byte order.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from dsec.linux.mounts import MountFlag, mount

ROOT: Final = 1
"""The number of the mount's own directory."""
MAX_READ_BYTES: Final = 1 << 20
"""The most one READ asks for."""
OPEN_DIRECT_IO: Final = 1
OPEN_NO_FLUSH: Final = 1 << 5

_MAJOR, _MINOR = 7, 40
_DEVICE = "/dev/fuse"
_BUFFER_BYTES = 8192
"""The least the kernel accepts; only writes would need more."""
_MAX_WRITE = 4096
_MAX_PAGES = MAX_READ_BYTES // 4096
_MAX_BACKGROUND = 8192
"""Reads the kernel hands out at once. With its own 12, a few that wait for a store would hold up
all that are here."""
_ASYNC_READ, _ASYNC_DIO, _PARALLEL_LOOKUPS = 1 << 0, 1 << 15, 1 << 18
_HAS_MAX_PAGES, _EXTENDED = 1 << 22, 1 << 30
_WANTED = _ASYNC_READ | _ASYNC_DIO | _PARALLEL_LOOKUPS | _HAS_MAX_PAGES | _EXTENDED
_HAS_RESEND_2 = 1 << (39 - 32)
_NOTIFY_RESEND = 7
_NOEXEC = MountFlag(8)

_IN_HEADER = struct.Struct("=IIQQIIIHH")
_OUT_HEADER = struct.Struct("=IiQ")
_INIT_IN = struct.Struct("=IIIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHHII24x")
_READ_IN = struct.Struct("=8xQI")
_INTERRUPT_IN = struct.Struct("=Q")
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_ATTR_OUT = struct.Struct("=QII")
_ENTRY_OUT = struct.Struct("=QQQQII")
_OPEN_OUT = struct.Struct("=QIi")
_STATFS_OUT = struct.Struct("=QQQQQIIII24x")
_DIRENT = struct.Struct("=QQII")


class Opcode(IntEnum):
    """Requests a file system of read-only files knows."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42


class Request(NamedTuple):
    """What the kernel asks."""

    opcode: int
    unique: int
    """Its number, for the answer."""
    node: int
    message: bytes
    """Header and body."""

    @property
    def text(self) -> bytes:
        """The body of a LOOKUP: a name."""
        return self.message[_IN_HEADER.size :].rstrip(b"\0")

    @property
    def span(self) -> tuple[int, int]:
        """The body of a READ or READDIR: offset and length."""
        offset, length = _READ_IN.unpack_from(self.message, _IN_HEADER.size)
        return offset, length

    @property
    def interrupted(self) -> int:
        """The body of an INTERRUPT: the number of the request nobody waits for any more."""
        (unique,) = _INTERRUPT_IN.unpack_from(self.message, _IN_HEADER.size)
        return int(unique)


class Unmounted(Exception):
    """The connection is over: unmounted, or aborted."""


class Attributes(NamedTuple):
    """A file or directory of root's, which nobody else may read."""

    node: int
    size_bytes: int
    directory: bool = False


def open_device() -> int:
    """A new connection to the kernel, not blocking; mount it next.

    Raises:
        OSError: there is no FUSE here, or it is not for us.
    """
    return os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)


def mount_device(descriptor: int, target: Path) -> None:
    """Mount a connection; nothing under `target` answers until it is greeted.

    Raises:
        OSError: naming the call and the target.
    """
    options = (
        f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,"
        f"default_permissions,max_read={MAX_READ_BYTES}"
    )
    flags = MountFlag.RDONLY | MountFlag.NOSUID | MountFlag.NODEV | _NOEXEC
    mount("dsec", target, "fuse.dsec", flags, options)


def greet(descriptor: int, timeout_s: float = 10.0) -> None:
    """Answer the kernel's greeting, the first request after the mount. Blocks.

    Raises:
        OSError: EPROTO if this kernel cannot send unanswered requests again (before 6.9);
            ETIMEDOUT if it says nothing.
    """
    request = _first_request(descriptor, timeout_s)
    major, minor, readahead, flags, flags2 = _INIT_IN.unpack_from(request.message, _IN_HEADER.size)
    if (major, minor) < (_MAJOR, _MINOR) or not flags2 & _HAS_RESEND_2:
        answer_error(descriptor, request.unique, errno.EPROTO)
        raise OSError(errno.EPROTO, f"FUSE {major}.{minor} of this kernel is too old", _DEVICE)
    answer(
        descriptor,
        request.unique,
        _INIT_OUT.pack(
            _MAJOR,
            _MINOR,
            readahead,
            flags & _WANTED,
            _MAX_BACKGROUND,
            _MAX_BACKGROUND,
            _MAX_WRITE,
            1,
            _MAX_PAGES,
            0,
            _HAS_RESEND_2,
            0,
        ),
    )


def _first_request(descriptor: int, timeout_s: float) -> Request:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll(timeout_s * 1000)
    request = read_request(descriptor)
    if request is None:
        raise OSError(errno.ETIMEDOUT, "no greeting from the kernel", _DEVICE)
    if request.opcode != Opcode.INIT:
        raise OSError(errno.EPROTO, f"greeted with request {request.opcode}", _DEVICE)
    return request


def read_request(descriptor: int) -> Request | None:
    """The next request, None if there is none now.

    Raises:
        Unmounted: there will be no more.
    """
    while True:
        try:
            message = os.read(descriptor, _BUFFER_BYTES)
        except BlockingIOError:
            return None
        except FileNotFoundError:
            continue  # it was interrupted while being handed over
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                raise Unmounted from error
            raise
        _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(message)
        return Request(opcode, unique, node, message)


def answer(descriptor: int, unique: int, body: bytes = b"") -> None:
    """Answer a request; nothing is copied here. One nobody waits for any more is fine."""
    header = _OUT_HEADER.pack(_OUT_HEADER.size + len(body), 0, unique)
    _write(descriptor, header, body)


def answer_error(descriptor: int, unique: int, number: int) -> None:
    """Answer a request with an errno."""
    _write(descriptor, _OUT_HEADER.pack(_OUT_HEADER.size, -number, unique), b"")


def _write(descriptor: int, header: bytes, body: bytes) -> None:
    try:
        os.writev(descriptor, (header, body))
    except FileNotFoundError:
        return  # its reader is gone, or it was sent again under another number
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.ECONNABORTED):
            raise  # else there is no mount any more, and the next read says so


def ask_again(descriptor: int) -> None:
    """Have the kernel send all requests again that were taken and not answered.

    Raises:
        OSError: EINVAL if this kernel cannot (before 6.9).
    """
    header = _OUT_HEADER.pack(_OUT_HEADER.size, _NOTIFY_RESEND, 0)
    os.write(descriptor, header)


def attributes_body(of: Attributes, valid_s: int) -> bytes:
    """The answer to GETATTR."""
    return _ATTR_OUT.pack(valid_s, 0, 0) + _attributes(of)


def entry_body(of: Attributes, valid_s: int) -> bytes:
    """The answer to LOOKUP: the name must be asked for again, the attributes may be kept."""
    return _ENTRY_OUT.pack(of.node, 0, 0, valid_s, 0, 0) + _attributes(of)


def _attributes(of: Attributes) -> bytes:
    mode = stat.S_IFDIR | 0o500 if of.directory else stat.S_IFREG | 0o400
    blocks, links = -(-of.size_bytes // 512), 2 if of.directory else 1
    return _ATTR.pack(
        *(of.node, of.size_bytes, blocks), *(0,) * 6, *(mode, links, 0, 0, 0, 4096, 0)
    )


def open_body(flags: int) -> bytes:
    """The answer to OPEN and OPENDIR; all file handles are 0."""
    return _OPEN_OUT.pack(0, flags, 0)


def statfs_body() -> bytes:
    """The answer to STATFS."""
    return _STATFS_OUT.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0)


def directory_body(entries: list[tuple[int, bytes, bool]], offset: int, limit: int) -> bytes:
    """The answer to READDIR.

    Args:
        entries: number, name, and whether it is a directory; all of them, in a fixed order.
        offset: how many the asker has.
        limit: bytes of the answer.
    """
    body = b""
    for place, (node, name, directory) in enumerate(entries[offset:], offset + 1):
        kind = stat.S_IFMT(stat.S_IFDIR if directory else stat.S_IFREG) >> 12
        entry = _DIRENT.pack(node, place, len(name), kind) + name
        entry += bytes(-len(entry) % 8)
        if len(body) + len(entry) > limit:
            break
        body += entry
    return body
