"""The seam's in-process side: an ASGI application instead of a network, for tests.

Unlike `httpx.ASGITransport` it streams: an answer can be read while the application still writes it,
and a client that goes away is a disconnect to the application.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote_to_bytes

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from dsec.base.errors import Unavailable
from dsec.sdk._answers import http_error
from dsec.sdk._async.transport import Response
from dsec.sdk._http import ConnectionFailed, Request

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
WINDOW = 8
"""Messages the application may be ahead of its reader, as with a socket's buffer."""


class AsgiTransport:
    """Requests to an application in this process.

    `async with AsgiTransport(app) as transport: client = DSecClient(transport=transport)`.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._group: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._group is not None:
            self._group.cancel_scope.cancel()
            await self._group.__aexit__(kind, exc, trace)

    def _exchange(self, scope: Message) -> _Exchange:
        if self._group is None:
            raise RuntimeError("enter the transport with `async with` first")
        exchange = _Exchange()
        self._group.start_soon(exchange.run, self._app, scope)
        return exchange

    async def send(
        self, request: Request, body: AsyncIterator[bytes] | None, timeout: float
    ) -> Response:
        """See Transport."""
        exchange = self._exchange(_scope(request, "http", "http"))
        try:
            if body is None:
                await exchange.give({"type": "http.request", "body": request.body})
            else:
                async for data in body:
                    await exchange.give({"type": "http.request", "body": data, "more_body": True})
                await exchange.give({"type": "http.request", "body": b""})
            start = await exchange.take(timeout)
        except BaseException:
            exchange.hang_up("http.disconnect")
            raise
        return _AsgiResponse(exchange, start)

    async def websocket(self, request: Request, timeout: float) -> _AsgiWebSocket:
        """See Transport."""
        exchange = self._exchange(_scope(request, "websocket", "ws"))
        try:
            await exchange.give({"type": "websocket.connect"})
            first = await exchange.take(timeout)
            refusal = await _refusal(exchange, first, timeout)
        except BaseException:
            exchange.hang_up("websocket.disconnect")
            raise
        if refusal is None:
            return _AsgiWebSocket(exchange)
        exchange.hang_up("websocket.disconnect")
        raise refusal

    async def aclose(self) -> None:
        """See Transport; the application's tasks end with the `async with`."""


def _scope(request: Request, kind: str, scheme: str) -> Message:
    path, _, query = request.target.partition("?")
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in request.headers.items()
    ]
    return {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": scheme,
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"asgi"), *headers],
        "client": ("asgi", 1),
        "server": ("asgi", 80),
        "subprotocols": [],
        "state": {},
        "extensions": {"websocket.http.response": {}},
    }


async def _refusal(exchange: _Exchange, first: Message, timeout: float) -> Exception | None:
    if first["type"] == "websocket.accept":
        return None
    if first["type"] != "websocket.http.response.start":
        return http_error(403, b"")
    body = (await exchange.take(timeout)).get("body", b"")
    return http_error(first["status"], body)


class _Exchange:
    """One run of the application, and the two channels to it."""

    def __init__(self) -> None:
        self._to_app: MemoryObjectSendStream[Message]
        self._from_app: MemoryObjectReceiveStream[Message]
        self._to_app, self._app_in = anyio.create_memory_object_stream[Message](WINDOW)
        self._app_out, self._from_app = anyio.create_memory_object_stream[Message](WINDOW)
        self._scope = anyio.CancelScope()
        self._goodbye: Message = {"type": "http.disconnect"}
        self._failure: Exception | None = None

    async def run(self, app: App, scope: Message) -> None:
        """The application's task; its exceptions are an aborted connection."""
        with self._app_in, self._app_out, self._scope:
            try:
                await app(scope, self._receive, self._send)
            except Exception as exc:  # noqa: BLE001 - a server drops the connection
                self._failure = exc

    async def _receive(self) -> Message:
        try:
            return await self._app_in.receive()
        except anyio.EndOfStream:
            return self._goodbye

    async def _send(self, message: Message) -> None:
        try:
            await self._app_out.send(message)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise OSError("the client is gone") from None

    async def give(self, message: Message) -> None:
        """A message to the application; one that no longer listens is not waited for."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._to_app.send(message)

    async def take(self, timeout: float) -> Message:
        """The application's next message."""
        with anyio.move_on_after(None if math.isinf(timeout) else timeout):
            try:
                return await self._from_app.receive()
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                raise ConnectionFailed(
                    f"the application ended early: {self._failure!r}", sent=True
                ) from self._failure
        raise ConnectionFailed(f"nothing heard for {timeout:.0f} s", sent=True)

    def hang_up(self, kind: str) -> None:
        """The client goes away."""
        self._goodbye = {"type": kind, "code": 1000}
        self._to_app.close()
        self._from_app.close()


class _AsgiResponse:
    def __init__(self, exchange: _Exchange, start: Message) -> None:
        self._exchange = exchange
        self._done = self._broken = False
        self.status: int = start["status"]
        self.headers: Mapping[str, str] = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in start.get("headers", [])
        }

    async def receive(self, timeout: float) -> bytes:
        """See Response."""
        if self._broken:
            raise ConnectionFailed("given up before its end", sent=True)
        while not self._done:
            try:
                message = await self._exchange.take(timeout)
            except BaseException:
                # As on a network: what is cancelled in the middle is closed.
                self._broken = True
                await self.aclose()
                raise
            self._done = not message.get("more_body", False)
            data: bytes = message.get("body", b"")
            if data:
                return data
        return b""

    async def aclose(self) -> None:
        """See Response."""
        self._done = True
        self._exchange.hang_up("http.disconnect")


class _AsgiWebSocket:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._ended = False

    async def send(self, data: bytes) -> None:
        """See WebSocket."""
        if data:
            await self._exchange.give({"type": "websocket.receive", "bytes": data})

    async def send_eof(self) -> None:
        """See WebSocket."""
        await self._exchange.give({"type": "websocket.receive", "bytes": b""})

    async def receive(self) -> bytes:
        """See WebSocket."""
        if self._ended:
            return b""
        try:
            message = await self._exchange.take(math.inf)
        except ConnectionFailed as exc:
            raise Unavailable(f"the stream broke off: {exc}") from exc
        if message["type"] == "websocket.close":
            self._ended = True
            if message.get("code", 1000) not in {1000, 1001}:
                raise Unavailable(f"the stream broke off: {message.get('reason')}")
            return b""
        data = message.get("bytes") or (message.get("text") or "").encode()
        self._ended = not data
        return data

    async def aclose(self) -> None:
        """See WebSocket."""
        self._exchange.hang_up("websocket.disconnect")
