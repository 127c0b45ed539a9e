# Generated from ../_async by tools/unasync.py; do not edit.
"""The one seam between the SDK and a network: send a request, get a response, open a WebSocket."""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

from typing_extensions import override

from dsec.sdk import _blocking
from dsec.sdk._http import (
    LAST_CHUNK,
    Address,
    ConnectionFailed,
    Request,
    ResponseParser,
    chunk,
)

IDLE_CONNECTIONS = 1024


class Response(Protocol):
    """An answer: its head, and its body as it comes."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Header fields, names in lower case."""
        ...

    def receive(self, timeout: float) -> bytes:
        """The next bytes of the body, b"" at its end.

        Raises:
            ConnectionFailed: the body broke off, or nothing came for `timeout` seconds.
        """
        ...

    def close(self) -> None:
        """Be done with it, read to the end or not."""
        ...


class PortStream(Protocol):
    """A connection to a port: bytes both ways, each direction ends by itself.

    One task may send while another receives. A connection that breaks is Unavailable.
    """

    def send(self, data: bytes) -> None:
        """Send bytes; waits until the connection has taken them."""
        ...

    def send_eof(self) -> None:
        """Say that no more will be sent; receiving goes on."""
        ...

    def receive(self) -> bytes:
        """The next bytes, b"" when the other side has ended its direction."""
        ...

    def close(self) -> None:
        """Close both directions."""
        ...


class Transport(Protocol):
    """What carries requests: a network, an application in this process, a fake."""

    def send(
        self, request: Request, body: Iterator[bytes] | None, timeout: float
    ) -> Response:
        """Send a request; returns when the head of the answer is there.

        Raises:
            ConnectionFailed: no answer; `sent` says whether the server may have seen the request.
        """
        ...

    def websocket(self, request: Request, timeout: float) -> PortStream:
        """Open a WebSocket.

        Raises:
            ConnectionFailed: as for send.
            DsecError: the server refused.
        """
        ...

    def close(self) -> None:
        """Close every connection."""
        ...


class _Connection:
    def __init__(self, stream: _blocking.Stream) -> None:
        self.stream = stream
        self.parser = ResponseParser()
        self.reused = False


class HttpResponse:
    """A response on a connection of the pool."""

    def __init__(self, pool: HttpTransport, connection: _Connection) -> None:
        self._pool = pool
        self._connection: _Connection | None = connection
        self._broken = False
        self.status = connection.parser.status
        self.headers: Mapping[str, str] = connection.parser.headers

    def receive(self, timeout: float) -> bytes:
        """See Response."""
        connection = self._connection
        if connection is None:
            if self._broken:
                raise ConnectionFailed("given up before its end", sent=True)
            return b""
        parser = connection.parser
        try:
            while not parser.body and not parser.complete:
                _fill(connection, timeout)
        except BaseException:
            # Also when we are cancelled: nobody may come back to close it.
            self._broken = True
            self.close()
            raise
        if parser.body:
            return parser.body.popleft()
        self._connection = None
        self._pool.give_back(connection)
        return b""

    def close(self) -> None:
        """See Response."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection)


class HttpTransport:
    """HTTP/1.1 over TCP or TLS. Connections are kept and the one used last is used next.

    There is no upper limit of connections: every call in flight has its own, as a trainer that
    starts a thousand sandboxes at once needs.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._tls = (tls or ssl.create_default_context()) if address.tls else None
        self._idle: deque[_Connection] = deque()
        self._closed = False

    @override
    def __repr__(self) -> str:
        return f"HttpTransport({str(self._address)!r})"

    def send(
        self, request: Request, body: Iterator[bytes] | None, timeout: float
    ) -> Response:
        """See Transport."""
        connection = self._connection(request, timeout)
        try:
            self._write(connection, request, body, timeout)
            while not connection.parser.head_done:
                _fill(connection, timeout)
        except ConnectionFailed as exc:
            connection.stream.close()
            exc.stale = connection.reused and not connection.parser.status
            raise
        except BaseException:
            with _blocking.finishing(1):
                connection.stream.close()
            raise
        return HttpResponse(self, connection)

    def _connection(self, request: Request, timeout: float) -> _Connection:
        # A kept connection may be closed by the server just as we write: only for requests that
        # can be sent twice.
        while request.repeatable and self._idle:
            connection = self._idle.pop()
            if not connection.stream.stale():
                connection.reused = True
                connection.parser.start()
                return connection
            connection.stream.close()
        timeout = min(timeout, _blocking.CONNECT_TIMEOUT_S)
        host, port = self._address.host, self._address.port
        return _Connection(_blocking.connect(host, port, self._tls, timeout))

    def _write(
        self,
        connection: _Connection,
        request: Request,
        body: Iterator[bytes] | None,
        timeout: float,
    ) -> None:
        stream = connection.stream
        try:
            stream.send(request.head(self._address) + request.body, timeout)
            if body is not None:
                for data in body:
                    if data:
                        stream.send(chunk(data), timeout)
                stream.send(LAST_CHUNK, timeout)
        except ConnectionFailed:
            # A server that refuses a body answers before it has read all of it.
            _fill(connection, 1.0)

    def give_back(self, connection: _Connection) -> None:
        """Take a connection back, to use again if its response was read to the end."""
        parser = connection.parser
        reusable = parser.complete and parser.keep_alive and not parser.body
        if reusable and not self._closed and len(self._idle) < IDLE_CONNECTIONS:
            self._idle.append(connection)
            # The last used is the first used again, so the oldest are those the server closes.
            if self._idle[0].stream.stale():
                self._idle.popleft().stream.close()
        else:
            with _blocking.finishing(1):
                connection.stream.close()

    def websocket(self, request: Request, timeout: float) -> PortStream:
        """See Transport."""
        # Few callers use ports; the others need not wait for the import.
        from dsec.sdk._sync.websocket import open_websocket

        host, port = self._address.host, self._address.port
        stream = _blocking.connect(
            host, port, self._tls, min(timeout, _blocking.CONNECT_TIMEOUT_S)
        )
        return open_websocket(stream, request, self._address, timeout)

    def close(self) -> None:
        """See Transport."""
        self._closed = True
        while self._idle:
            self._idle.pop().stream.close()


def _fill(connection: _Connection, timeout: float) -> None:
    data = connection.stream.receive(timeout)
    if data:
        connection.parser.feed(data)
    else:
        connection.parser.feed_eof()
