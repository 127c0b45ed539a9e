"""Requests, addresses and failures: what goes over the seam `Transport`, whatever carries it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from typing_extensions import override

from dsec.base.errors import InvalidRequest

QueryValue = str | bytes | int | float | bool | None


class ConnectionFailed(Exception):
    """The connection did not do its work; `sent` says whether the server may have seen a request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Address:
    """Where the API is."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return host if self.port == default else f"{host}:{self.port}"

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.scheme == "https"

    @override
    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_address(url: str) -> Address:
    """Read a base URL.

    Raises:
        InvalidRequest: it is not `http://` or `https://` with a host.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise InvalidRequest(f"API URL {url!r}: {exc}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidRequest(f"API URL {url!r} must look like http://host:port")
    default = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"))


def segment(text: str) -> str:
    """An id the user gave, as a part of a path.

    Raises:
        InvalidRequest: it cannot be one.
    """
    if not text or not text.isascii() or any(c in text for c in "/?#% \t\r\n") or text[0] == ".":
        raise InvalidRequest(f"{text[:80]!r} is not an id")
    return text


def encode_query(pairs: Mapping[str, QueryValue | list[str]]) -> str:
    """A query string; None is left out, bytes and surrogates go over as the bytes they stand for."""
    out: list[str] = []
    for key, value in pairs.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        out.extend(f"{key}={quote(_query_bytes(item), safe='/')}" for item in values)
    return "&".join(out)


def _query_bytes(value: QueryValue) -> bytes:
    match value:
        case bytes():
            return value
        case bool():
            return b"true" if value else b"false"
        case str():
            return value.encode("utf-8", "surrogateescape")
        case _:
            return repr(value).encode()


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `body` is bytes here; a streamed body travels beside it."""

    method: str
    path: str
    query: Mapping[str, QueryValue | list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    streamed: bool = False
    """The body follows in chunks."""
    repeatable: bool = True
    """Sending it twice does no harm."""
    patience_s: float = 90.0
    """How long the head of the answer may take."""

    @property
    def target(self) -> str:
        """Path and query as they go over the wire."""
        query = encode_query(self.query)
        return f"{self.path}?{query}" if query else self.path


def _socket_options() -> list[tuple[int, int, int]]:
    # At once, and have the kernel find out within a minute when the other side is gone.
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), seconds))
    return options


SOCKET_OPTIONS = _socket_options()
ENDED_WELL = frozenset({1000, 1001, 1005})
"""Codes with which a WebSocket is closed when nothing went wrong."""
