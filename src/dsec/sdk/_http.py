"""HTTP/1.1 without input or output: what is sent, what comes back, how a connection fails.

The parser is httptools (llhttp), the one uvicorn uses; docs/adr/0050 has the measurements.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

import httptools
from typing_extensions import override

from dsec.base.errors import InvalidRequest

QueryValue = str | bytes | int | float | bool | None


class ConnectionFailed(Exception):
    """The connection did not do its work; `sent` says whether the server may have seen a request."""

    def __init__(self, message: str, *, sent: bool, silence: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.silence = silence
        """Nothing broke, but nothing was heard for as long as we were told to wait."""
        self.stale = False
        """It was an idle connection the server had closed: worth an immediate second attempt."""


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

    def head(self, address: Address) -> bytes:
        """Request line and headers."""
        lines = [
            f"{self.method} {address.prefix}{self.target} HTTP/1.1",
            f"Host: {address.authority}",
        ]
        lines += [f"{name}: {_header_value(value)}" for name, value in self.headers.items()]
        if self.streamed:
            lines.append("Transfer-Encoding: chunked")
        elif self.body or self.method in {"POST", "PUT"}:
            lines.append(f"Content-Length: {len(self.body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def _header_value(value: str) -> str:
    if "\r" in value or "\n" in value or "\0" in value:
        raise InvalidRequest("a header value must be one line")
    return value


def chunk(data: bytes) -> bytes:
    """One chunk of a streamed body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def watch_peer(sock: socket.socket) -> None:
    """Have the kernel find out when the other side is gone without a word, within a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


LAST_CHUNK = b"0\r\n\r\n"


class ResponseParser:
    """Turns the bytes of one connection into responses, one after the other."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body: deque[bytes] = deque()
        self.head_done = False
        self.complete = False
        self.keep_alive = False

    def start(self) -> None:
        """Get ready for the next response on this connection."""
        self.status = 0
        self.headers = {}
        self.body.clear()
        self.head_done = self.complete = self.keep_alive = False

    def feed(self, data: bytes) -> None:
        """Take bytes in.

        Raises:
            ConnectionFailed: they are no HTTP.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise ConnectionFailed("the server changed protocols unasked", sent=True) from None
        except httptools.HttpParserError as exc:
            raise ConnectionFailed(f"the answer is not HTTP: {exc}", sent=True) from None

    def feed_eof(self) -> None:
        """The connection has ended.

        Raises:
            ConnectionFailed: in the middle of a response.
        """
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        if not self.head_done or framed:
            raise ConnectionFailed("the server closed the connection", sent=True)
        self.complete = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser callback."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Parser callback."""
        self.status = self._parser.get_status_code()
        self.head_done = self.status >= 200
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Parser callback."""
        self.body.append(data)

    def on_message_complete(self) -> None:
        """Parser callback."""
        if self.head_done:
            self.complete = True
        else:  # an informational answer: the real one follows
            self.headers = {}
