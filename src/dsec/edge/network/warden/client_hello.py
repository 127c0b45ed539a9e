"""Which server a TLS client asks for: the first message of a connection, read as bytes. Pure.

Written to be strict: what two readers could understand in two ways is malformed. A hello may come
in many records, and in pieces of any size.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

HANDSHAKE = 22
"""First byte of a connection that speaks TLS."""
MAX_HELLO_BYTES = 32 * 1024
MAX_RECORDS = 64
"""A client may cut its hello into pieces of one byte; none does."""
_MAX_RECORD_BYTES = 16 * 1024
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0
_NAME = re.compile(rb"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_MAX_NAME_BYTES = 253


class MalformedHello(ValueError):
    """It is no TLS client hello, or one with two meanings."""


class Hello(Struct, frozen=True):
    """What is known of a client's hello."""

    server: str | None
    """In lower case; None: it names no server."""


class _Bytes:
    """Reads vectors off a message; running out is malformed."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise MalformedHello("a field is longer than its message")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, length_size: int) -> bytes:
        return self.take(self.number(length_size))

    @property
    def left(self) -> bool:
        return self._at < len(self._data)


def read_hello(data: bytes) -> Hello | None:
    """Understand the first bytes of a connection.

    Args:
        data: all that came so far.

    Returns:
        None: more is needed.

    Raises:
        MalformedHello: this will not become one.
    """
    message = _message(data)
    if message is None:
        if len(data) > MAX_HELLO_BYTES:
            raise MalformedHello("too long")
        return None
    return Hello(_server(_extensions(message)))


def _message(data: bytes) -> bytes | None:
    """The body of the first handshake message, out of its records; None: more is needed."""
    body, at = bytearray(), 0
    for _ in range(MAX_RECORDS):
        header = data[at : at + 5]
        _check_record(header)
        size = int.from_bytes(header[3:5], "big")
        body += data[at + 5 : at + 5 + size]
        wanted = _wanted(body)
        if wanted is not None and len(body) >= wanted:
            return _exactly(body, wanted)
        if len(header) < 5 or len(data) < at + 5 + size:
            return None
        at += 5 + size
    raise MalformedHello("too many records")


def _check_record(header: bytes) -> None:
    """Refuse as early as it can be told."""
    if header[:1] not in {b"", b"\x16"} or header[1:2] not in {b"", b"\x03"}:
        raise MalformedHello("no handshake record")
    size = int.from_bytes(header[3:5], "big")
    if len(header) == 5 and not 0 < size <= _MAX_RECORD_BYTES:
        raise MalformedHello("a record of no possible size")


def _wanted(body: bytearray) -> int | None:
    """How long the message is, its header included; None: not known yet."""
    if body and body[0] != _CLIENT_HELLO:
        raise MalformedHello("no client hello")
    if len(body) < 4:
        return None
    wanted = 4 + int.from_bytes(body[1:4], "big")
    if wanted > MAX_HELLO_BYTES:
        raise MalformedHello("too long")
    return wanted


def _exactly(body: bytearray, wanted: int) -> bytes:
    if len(body) > wanted:
        raise MalformedHello("something follows the hello in its record")
    return bytes(body[4:wanted])


def _extensions(message: bytes) -> bytes:
    hello = _Bytes(message)
    if hello.take(2)[:1] != b"\x03":
        raise MalformedHello("no version of TLS")
    hello.take(32)
    hello.vector(1)
    hello.vector(2)
    hello.vector(1)
    extensions = hello.vector(2) if hello.left else b""
    if hello.left:
        raise MalformedHello("something follows the extensions")
    return extensions


def _server(extensions: bytes) -> str | None:
    rest, seen = _Bytes(extensions), set[int]()
    server: str | None = None
    while rest.left:
        kind, body = rest.number(2), rest.vector(2)
        if kind in seen:
            raise MalformedHello("an extension twice")
        seen.add(kind)
        if kind == _SERVER_NAME:
            server = _host_name(body)
    return server


def _host_name(extension: bytes) -> str:
    outer = _Bytes(extension)
    names = _Bytes(outer.vector(2))
    kind, name = names.number(1), names.vector(2)
    if outer.left or names.left or kind != _HOST_NAME:
        raise MalformedHello("not exactly one host name")
    lowered = name.lower()
    if len(name) > _MAX_NAME_BYTES or not _NAME.fullmatch(lowered):
        raise MalformedHello("a host name of no possible form")
    return lowered.decode("ascii")


Kind = Literal["tls", "http", "other"]
_METHOD = re.compile(rb"[A-Z]{1,24}( |$)")


def kind_of(data: bytes) -> Kind | None:
    """What a connection's first bytes speak; None: more is needed."""
    if not data:
        return None
    if data[0] == HANDSHAKE:
        return "tls"
    found = _METHOD.match(data[:25])
    if found is None:
        return "other"
    return "http" if found.group(1) else None
