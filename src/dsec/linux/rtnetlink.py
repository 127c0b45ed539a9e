"""Routing netlink: requests encoded, many sent in one system call, answers decoded.

Only what `net` needs. With a library for all of netlink (pyroute2) a slot took 22 ms to make, and 5
with these (each measured once, on a machine not equally busy); and it runs an event loop of its own in
every thread that uses it, which does not go with async tests.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ACK, DUMP, REPLACE, EXCLUSIVE, CREATE = 0x4, 0x300, 0x100, 0x200, 0x400
_REQUEST, _DUMP_INTERRUPTED = 0x1, 0x10
_CAPPED, _HAS_ATTRIBUTES = 0x100, 0x200
_ERROR, _DONE = 2, 3
_MESSAGE_OF_KERNEL = 1
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_BUFFER_BYTES = 1 << 17
_DUMP_ATTEMPTS = 20
_NESTED = 0x8000
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR_BYTES = _HEADER.size + 4


class Request(NamedTuple):
    """One message to the kernel."""

    kind: int
    flags: int
    body: bytes
    what: str
    """For who reads the error."""


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def text(kind: int, value: str) -> bytes:
    """An attribute that is a string."""
    return attribute(kind, value.encode() + b"\0")


def number(kind: int, value: int) -> bytes:
    """An attribute of 32 bits."""
    return attribute(kind, struct.pack("=I", value))


def nested(kind: int, *values: bytes) -> bytes:
    """An attribute made of attributes."""
    return attribute(kind | _NESTED, b"".join(values))


def attributes(data: bytes) -> dict[int, bytes]:
    """Attributes by their kinds.

    Raises:
        ValueError: one has no end.
    """
    found: dict[int, bytes] = {}
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size or at + length > len(data):
            raise ValueError("an attribute of netlink is cut off")
        found[kind & 0x3FFF] = data[at + _ATTRIBUTE.size : at + length]
        at += length + -length % 4
    return found


class Socket:
    """A socket of the namespace that its maker was in. Blocks; one thread at a time."""

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: the kernel has no netlink, or no descriptor is left.
        """
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        for option in (_CAP_ACK, _EXT_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._sequence = itertools.count(1)

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def change(self, requests: Sequence[Request]) -> None:
        """Have the kernel do all of them, in order; one that fails does not stop those after it.

        Raises:
            OSError: the first that failed.
        """
        sent = {next(self._sequence): request for request in requests}
        self._socket.send(b"".join(_encode(number, each, ACK) for number, each in sent.items()))
        failures = []
        while sent:
            for kind, flags, sequence, body in self._receive():
                request = sent.pop(sequence, None)
                if kind == _ERROR and request is not None:
                    failures += _failure(request, flags, body)
        if failures:
            raise failures[0]

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """All there is of a kind, at one moment.

        Raises:
            OSError: the kernel refused, or things changed each time while it told them.
        """
        for _ in range(_DUMP_ATTEMPTS):
            found = self._dump(Request(kind, DUMP, body, f"dump {kind}"))
            if found is not None:
                return found
        raise OSError(errno.EAGAIN, f"netlink dump {kind}: it changes all the time")

    def _dump(self, request: Request) -> list[bytes] | None:
        own = next(self._sequence)
        self._socket.send(_encode(own, request, 0))
        found: list[bytes] = []
        interrupted = False
        while True:
            for kind, flags, sequence, body in self._receive():
                if sequence != own:
                    continue
                interrupted |= bool(flags & _DUMP_INTERRUPTED)
                if kind == _DONE:
                    return None if interrupted else found
                if kind == _ERROR:
                    raise _failure(request, flags, body)[0]
                found.append(body)

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, sequence number and body of some messages."""
        data = self._socket.recv(_BUFFER_BYTES)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
            yield kind, flags, sequence, data[at + _HEADER.size : at + length]
            at += length + -length % 4


def _encode(sequence: int, request: Request, more: int) -> bytes:
    length = _HEADER.size + len(request.body)
    flags = request.flags | _REQUEST | more
    return (
        _HEADER.pack(length, request.kind, flags, sequence, 0) + request.body + bytes(-length % 4)
    )


def _failure(request: Request, flags: int, body: bytes) -> list[OSError]:
    """What an answer says went wrong, if anything, in the kernel's own words where it has some."""
    code = -struct.unpack_from("=i", body)[0]
    if code == 0:
        return []
    said = b""
    if flags & _HAS_ATTRIBUTES and flags & _CAPPED:
        said = attributes(body[_ERROR_BYTES:]).get(_MESSAGE_OF_KERNEL, b"")
    why = said.rstrip(b"\0").decode("utf-8", "replace")
    words = f"{request.what}: {os.strerror(code)}" + (f" ({why})" if why else "")
    return [OSError(code, words)]
