"""Raw bodies over HTTP and WebSockets: backpressure both ways, and never a clean end of a broken one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import anyio
import anyio.abc
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from typing_extensions import override

from dsec.base.errors import DsecError
from dsec.edge.ahead import reading_ahead
from dsec.edge.channel import AetherStream, Data, End
from dsec.edge.charge import Charge
from dsec.kit.http import LateJson, as_error, error_response

OCTETS = "application/octet-stream"
TAR = "application/x-tar"
MAX_REASON_BYTES = 123
"""What a WebSocket close frame can carry."""

Source = AbstractAsyncContextManager[tuple[Mapping[str, str], AsyncIterator[bytes]]]


class RawStream(Response):
    """Bytes as they come. A client that leaves ends the reading; a failure aborts the body.

    The status waits for the first bytes, so that a failure before them has its own.
    """

    def __init__(self, source: Callable[[], Source], media_type: str = OCTETS) -> None:
        super().__init__()
        self._source = source
        self._kind = media_type

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it (ASGI)."""
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
            try:
                await self._serve(send)
            except Exception as exc:  # noqa: BLE001 - raised again outside the group
                failure = exc
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _serve(self, send: Send) -> None:
        async with self._source() as (headers, chunks):
            first = await anext(chunks, b"")
            listed = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", self._kind.encode()), *listed],
                }
            )
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class ChargedJson(LateJson):
    """A `LateJson` whose work is told what to charge; that is held until the answer has gone out."""

    def __init__(self, work: Callable[[Charge], Awaitable[object]]) -> None:
        self._charge = charge = Charge()
        super().__init__(lambda: work(charge))

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it (ASGI)."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._charge.release()


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def body_of(request: Request) -> AsyncIterator[bytes]:
    """A request's raw body; raises ClientDisconnect if it breaks off."""
    return request.stream()


async def relay(
    socket: WebSocket, connecting: Callable[[], AbstractAsyncContextManager[AetherStream]]
) -> None:
    """A port inside as a WebSocket. An empty message ends its direction."""
    accepted = False
    try:
        async with connecting() as stream:
            await socket.accept()
            accepted = True
            await _relay_both(socket, stream)
    except WebSocketDisconnect:
        return
    except Exception as exc:  # noqa: BLE001 - the WebSocket boundary
        await _refuse(socket, as_error(exc), accepted=accepted)


async def _relay_both(socket: WebSocket, stream: AetherStream) -> None:
    failure: Exception | None = None
    async with anyio.create_task_group() as group:

        async def upwards() -> None:
            try:
                await _to_sandbox(socket, stream)
            except WebSocketDisconnect:
                group.cancel_scope.cancel()
            except DsecError:
                pass  # the other direction hears the same and says so

        group.start_soon(upwards)
        try:
            await _to_client(socket, stream)
            await socket.close()
        except Exception as exc:  # noqa: BLE001 - raised again outside the group
            failure = exc
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _to_sandbox(socket: WebSocket, stream: AetherStream) -> None:
    ended = False
    async with reading_ahead(_messages(socket)) as messages:
        async for data in messages:
            if ended:
                continue  # only the disconnect is of interest now
            if data:
                await stream.send(data)
            else:
                stream.end()
                ended = True


async def _messages(socket: WebSocket) -> AsyncGenerator[bytes, None]:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        yield message.get("bytes") or (message.get("text") or "").encode()


async def _to_client(socket: WebSocket, stream: AetherStream) -> None:
    async for item in stream:
        if isinstance(item, Data):
            await socket.send_bytes(item.data)
        elif isinstance(item, End):
            await socket.send_bytes(b"")


async def _refuse(socket: WebSocket, error: DsecError, *, accepted: bool) -> None:
    if accepted:
        reason = f"{error.code}: {error.message}".encode()[:MAX_REASON_BYTES]
        await socket.close(1011, reason.decode("utf-8", "ignore"))
    elif "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(error_response(error))
    else:
        await socket.close(1008, error.code)
