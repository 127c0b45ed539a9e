"""The network by urllib3 and websockets, for the synchronous SDK; `_aiohttp` is its twin."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from threading import Event

import urllib3
import websockets.sync.client
from typing_extensions import override
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from dsec.base.errors import InvalidRequest, Unavailable
from dsec.sdk import _blocking
from dsec.sdk._answers import http_error
from dsec.sdk._http import ENDED_WELL, SOCKET_OPTIONS, Address, ConnectionFailed, Request
from dsec.sdk._patience import HEARD_WITHIN_S

CONNECT_TIMEOUT_S = 10.0
IDLE_CONNECTIONS = 1024
MESSAGE_BYTES = 64 << 10
LONGEST_MESSAGE_BYTES = 16 << 20
CLOSE_WAIT_S = 2.0


class HttpResponse:
    """See Response. One read to its end gives its connection back by itself."""

    def __init__(
        self, response: urllib3.BaseHTTPResponse, own: urllib3.HTTPConnectionPool | None
    ) -> None:
        self._response = response
        self._own = own
        self._closed = self._broken = False
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    def receive(self, timeout: float) -> bytes:
        """See Response."""
        if self._broken:
            raise ConnectionFailed("given up before its end", sent=True)
        if self._closed:
            return b""
        try:
            self._limit(timeout)
            data = self._response.read1(_blocking.CHUNK_BYTES, decode_content=False)
        except BaseException as exc:
            self._broken = True
            self.close()
            if isinstance(exc, ReadTimeoutError):
                text = f"nothing heard for {timeout:.0f} s"
                raise ConnectionFailed(text, sent=True) from exc
            if isinstance(exc, (HTTPError, OSError, ValueError)):
                raise ConnectionFailed(f"connection lost: {_words(exc)}", sent=True) from exc
            raise
        if not data:
            self.close()
        return data

    def _limit(self, timeout: float) -> None:
        # The socket of an answer that ends with its connection is out of reach: there the limit
        # that was set for the head goes on.
        connection = self._response.connection
        sock = getattr(connection, "sock", None)
        if sock is not None:
            sock.settimeout(max(timeout, 0.001))

    def close(self) -> None:
        """See Response."""
        self._closed = True
        self._response.close()
        self._response.release_conn()
        if self._own is not None:
            self._own.close()


class WebSocket:
    """See PortStream: binary messages, an empty one ends its direction."""

    def __init__(self, stream: websockets.sync.client.ClientConnection, stack: ExitStack) -> None:
        self._stream = stream
        self._stack = stack
        self._ended = False

    def send(self, data: bytes) -> None:
        """See PortStream."""
        for start in range(0, len(data), MESSAGE_BYTES):
            self._send(data[start : start + MESSAGE_BYTES])

    def send_eof(self) -> None:
        """See PortStream."""
        self._send(b"")

    def _send(self, data: bytes) -> None:
        try:
            self._stream.send(data)
        except (ConnectionClosed, OSError) as exc:
            raise Unavailable(f"the stream broke off: {_words(exc)}") from exc

    def receive(self) -> bytes:
        """See PortStream."""
        pong: Event | None = None
        while not self._ended:
            try:
                data = self._stream.recv(HEARD_WITHIN_S / 2, decode=False)
            except TimeoutError:
                # The library's own heartbeat would also break a stream nobody reads from just now.
                if pong is not None and not pong.is_set():
                    raise Unavailable("the stream broke off: nothing heard") from None
                pong = self._ping()
                continue
            except ConnectionClosed as exc:
                if exc.rcvd is None or exc.rcvd.code not in ENDED_WELL:
                    raise Unavailable(f"the stream broke off: {_words(exc)}") from exc
                data = b""
            self._ended = not data
            return data
        return b""

    def _ping(self) -> Event:
        try:
            return self._stream.ping()
        except (ConnectionClosed, OSError) as exc:
            raise Unavailable(f"the stream broke off: {_words(exc)}") from exc

    def close(self) -> None:
        """See PortStream."""
        self._ended = True
        with suppress(ConnectionClosed, OSError):
            self._stack.close()


class HttpTransport:
    """HTTP/1.1 and WebSockets over TCP or TLS. Threads may share it.

    There is no upper limit of connections: every call in flight has its own.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._tls = (tls or ssl.create_default_context()) if address.tls else None
        self._kept = self._pool(IDLE_CONNECTIONS)

    @override
    def __repr__(self) -> str:
        return f"HttpTransport({str(self._address)!r})"

    def _pool(self, size: int) -> urllib3.HTTPConnectionPool:
        host, port = self._address.host, self._address.port
        if self._tls is None:
            return urllib3.HTTPConnectionPool(
                host, port, maxsize=size, socket_options=SOCKET_OPTIONS
            )
        return urllib3.HTTPSConnectionPool(
            host, port, maxsize=size, socket_options=SOCKET_OPTIONS, ssl_context=self._tls
        )

    def send(self, request: Request, body: Iterator[bytes] | None, timeout: float) -> HttpResponse:
        """See Transport."""
        until = _blocking.monotonic() + timeout
        if request.repeatable and body is None:
            try:
                return HttpResponse(self._exchange(self._kept, request, None, timeout), None)
            except ConnectionFailed as exc:
                if not exc.sent or _blocking.monotonic() >= until:
                    raise
                # Perhaps it was a kept connection the server had just closed.
        # What cannot be sent twice must not meet such a one.
        own = self._pool(1)
        try:
            left = until - _blocking.monotonic()
            return HttpResponse(self._exchange(own, request, body, left), own)
        except BaseException:
            own.close()
            raise

    def _exchange(
        self,
        pool: urllib3.HTTPConnectionPool,
        request: Request,
        body: Iterator[bytes] | None,
        timeout: float,
    ) -> urllib3.BaseHTTPResponse:
        timeout = max(timeout, 0.001)
        upload = None if body is None else _Upload(body)
        # urllib3's limit for connecting is also the one for each piece it sends.
        short = upload is None and len(request.body) <= _blocking.CHUNK_BYTES
        connect = min(timeout, CONNECT_TIMEOUT_S) if short else timeout
        try:
            # Not through a PoolManager, which would rewrite the path.
            return pool.urlopen(
                request.method,
                f"{self._address.prefix}{request.target}",
                body=upload.chunks() if upload is not None else request.body or None,
                headers=request.headers,
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=connect, read=timeout),
                preload_content=False,
                decode_content=False,
            )
        except Exception as exc:
            if upload is not None and upload.failure is not None:
                raise upload.failure from None
            raise _failure(exc, timeout) from exc

    def websocket(self, request: Request, timeout: float) -> WebSocket:
        """See Transport."""
        stack = ExitStack()
        try:
            connection = websockets.sync.client.connect(
                f"ws{str(self._address).removeprefix('http')}{request.target}",
                ssl=self._tls,
                compression=None,
                additional_headers=request.headers,
                user_agent_header=None,
                proxy=None,
                open_timeout=timeout,
                ping_interval=None,
                close_timeout=CLOSE_WAIT_S,
                max_size=LONGEST_MESSAGE_BYTES,
            )
            return WebSocket(stack.enter_context(connection), stack)
        except InvalidStatus as exc:
            body = bytes(exc.response.body or b"")
            raise http_error(exc.response.status_code, body) from exc
        except OSError as exc:
            raise ConnectionFailed(_words(exc), sent=False) from exc
        except (InvalidHandshake, EOFError) as exc:
            raise ConnectionFailed(f"no WebSocket: {_words(exc)}", sent=True) from exc

    def close(self) -> None:
        """See Transport; using it again opens it again."""
        kept, self._kept = self._kept, self._pool(IDLE_CONNECTIONS)
        kept.close()


def _failure(exc: Exception, timeout: float) -> Exception:
    match exc:
        case NewConnectionError() | ConnectTimeoutError():
            return ConnectionFailed(_words(exc), sent=False)
        case ReadTimeoutError():
            return ConnectionFailed(f"nothing heard for {timeout:.0f} s", sent=True)
        case HTTPError() | OSError():
            return ConnectionFailed(f"connection lost: {_words(exc)}", sent=True)
        case ValueError():  # what http.client says of header fields
            return InvalidRequest(f"the request cannot be sent: {exc}")
        case _:
            return exc


class _Upload:
    """A streamed body, and what went wrong in it."""

    def __init__(self, body: Iterator[bytes]) -> None:
        self._body = body
        self.failure: Exception | None = None

    def chunks(self) -> Iterator[bytes]:
        """The body."""
        try:
            yield from self._body
        except Exception as exc:
            self.failure = exc
            raise


def _words(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
