"""Passes requests on a sandbox to an edge in another process: bytes in, bytes out, no decoding."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus

import anyio
import anyio.abc
import httpx
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException
from websockets.uri import parse_uri

from dsec.base.errors import InvalidRequest, Unavailable
from dsec.control.remote import CONNECT_TIMEOUT_S, EdgeLink, refused_us
from dsec.kit import log
from dsec.kit.generators import closing
from dsec.wire.edge_v1 import PRINCIPAL_HEADER

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OURS = _HOP_BY_HOP | {b"host", b"expect", b"x-request-id"}
_PRINCIPAL = PRINCIPAL_HEADER.encode()
MAX_MESSAGE_BYTES = 16 << 20


class Forward:
    """The way to an edge as an ASGI application."""

    def __init__(self, link: EdgeLink) -> None:
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection there.

        Raises:
            Unavailable: the edge cannot be reached, or broke off before or in its answer.
        """
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        failure: Exception | None = None
        body = _Body(scope, receive)
        async with anyio.create_task_group() as group:
            group.start_soon(body.cancel_on_disconnect, group.cancel_scope)
            try:
                await self._http(scope, body, send)
            except ClientDisconnect:
                pass
            except Exception as exc:  # noqa: BLE001 - raised outside, or the group would wrap it
                failure = exc
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _http(self, scope: Scope, body: _Body, send: Send) -> None:
        headers = [h for h in scope["headers"] if h[0] not in _OURS]
        headers.append((b"x-request-id", log.request_id.get().encode()))
        response = await self._link.open(scope["method"], _raw_path(scope), headers, body.content())
        try:
            if response.status_code == HTTPStatus.UNAUTHORIZED:
                raise refused_us()
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status_code,
                    "headers": [
                        (name.lower(), value)
                        for name, value in response.headers.raw
                        if name.lower() not in _HOP_BY_HOP
                    ],
                }
            )
            async with closing(response.aiter_raw()) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except httpx.TransportError as exc:
            raise self._link.broken(exc) from exc
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        try:
            upstream = await self._connect(scope)
        except InvalidStatus as exc:
            if exc.response.status_code == HTTPStatus.UNAUTHORIZED:
                raise refused_us() from exc
            await _relay_refusal(exc, send)
            return
        except (OSError, TimeoutError, WebSocketException) as exc:
            raise Unavailable(f"the edge at {self._link.address} is away", sent=False) from exc
        try:
            await send({"type": "websocket.accept", "subprotocol": upstream.subprotocol})
            async with anyio.create_task_group() as group:
                group.start_soon(_upwards, upstream, receive, group.cancel_scope)
                await _downwards(upstream, send)
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await upstream.close()

    async def _connect(self, scope: Scope) -> ClientConnection:
        headers = {"X-Request-Id": log.request_id.get()}
        for name, value in scope["headers"]:
            if name == _PRINCIPAL:  # the rest is the client's handshake, which ends here
                headers[PRINCIPAL_HEADER] = value.decode("latin-1")
        if self._link.token:
            headers["Authorization"] = f"Bearer {self._link.token}"
        # The pings are the edge's and the client's; compressing binary streams buys nothing.
        uri = _websocket_uri(self._link.url.netloc, _raw_path(scope))
        if self._link.unix_socket:
            return await unix_connect(
                self._link.unix_socket,
                uri,
                additional_headers=headers,
                compression=None,
                open_timeout=CONNECT_TIMEOUT_S,
                max_size=MAX_MESSAGE_BYTES,
            )
        return await connect(
            uri,
            additional_headers=headers,
            compression=None,
            open_timeout=CONNECT_TIMEOUT_S,
            max_size=MAX_MESSAGE_BYTES,
            proxy=None,
        )


class _Body:
    """A request's body, and what comes after it: the client's departure."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self._empty = not names & {b"content-length", b"transfer-encoding"}
        self._receive = receive
        self._read = anyio.Event()

    def content(self) -> AsyncIterator[bytes] | None:
        """The body in pieces; None if there is none."""
        if self._empty:
            self._read.set()
            return None
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if chunk := message.get("body", b""):
                yield chunk
            if not message.get("more_body", False):
                self._read.set()
                return

    async def cancel_on_disconnect(self, scope: anyio.CancelScope) -> None:
        """Wait until the client leaves after its body was read, then cancel."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


def _raw_path(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + b"?" + query if query else path


def _websocket_uri(netloc: bytes, raw_path: bytes) -> str:
    """The address of a WebSocket at the edge.

    Raises:
        InvalidRequest: what would be asked for is not what came in.
    """
    path = raw_path.decode("latin-1")
    uri = f"ws://{netloc.decode()}{path}"
    try:
        kept = parse_uri(uri).resource_name == path
    except InvalidURI:
        kept = False
    if not kept:
        raise InvalidRequest(f"not an address: {path}")
    return uri


async def _upwards(upstream: ClientConnection, receive: Receive, scope: anyio.CancelScope) -> None:
    """Client to edge, until the client closes."""
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            scope.cancel()
            return
        data = message.get("bytes")
        try:
            await upstream.send(message["text"] if data is None else data)
        except ConnectionClosed:
            return  # `_downwards` sees it too and tells the client


async def _downwards(upstream: ClientConnection, send: Send) -> None:
    """Edge to client, until the edge closes."""
    try:
        async for data in upstream:
            kind = "text" if isinstance(data, str) else "bytes"
            await send({"type": "websocket.send", kind: data})
    except ConnectionClosed:
        pass
    code = upstream.close_code or 1011
    await send(
        {
            "type": "websocket.close",
            "code": 1011 if code == 1006 else code,
            "reason": upstream.close_reason or "",
        }
    )


async def _relay_refusal(refusal: InvalidStatus, send: Send) -> None:
    response = refusal.response
    kind = response.headers.get("content-type", "application/json").encode()
    await send(
        {
            "type": "websocket.http.response.start",
            "status": response.status_code,
            "headers": [(b"content-type", kind)],
        }
    )
    await send({"type": "websocket.http.response.body", "body": bytes(response.body)})
