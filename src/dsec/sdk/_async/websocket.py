"""A WebSocket as a stream of bytes: binary messages, an empty one ends its direction."""

from __future__ import annotations

import math
from collections import deque

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.protocol import CLOSED, OPEN
from websockets.uri import WebSocketURI

from dsec.base.errors import Unavailable
from dsec.sdk import _aio
from dsec.sdk._answers import http_error
from dsec.sdk._http import Address, ConnectionFailed, Request
from dsec.sdk._patience import HEARD_WITHIN_S

MESSAGE_BYTES = 64 << 10
CLOSE_WAIT_S = 2.0
_DATA = frozenset({Opcode.BINARY, Opcode.TEXT, Opcode.CONT})


class WebSocket:
    """One WebSocket. One task may send while another receives.

    Back-pressure both ways: a send waits for the connection to take the bytes, and nothing is read
    from the connection before somebody asks for it.
    """

    def __init__(self, stream: _aio.Stream, protocol: ClientProtocol) -> None:
        self._stream = stream
        self._protocol = protocol
        self._lock = _aio.Lock()
        self._received: deque[bytes] = deque()
        self._message_bytes = 0
        self._ended = False
        self._drain()  # data may have come together with the handshake

    async def send(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            Unavailable: the connection is gone.
        """
        for start in range(0, len(data), MESSAGE_BYTES):
            await self._send(data[start : start + MESSAGE_BYTES])

    async def send_eof(self) -> None:
        """Say that no more will be sent; receiving goes on."""
        await self._send(b"")

    async def _send(self, data: bytes) -> None:
        async with self._lock:
            if self._protocol.state is not OPEN:
                raise Unavailable("the stream is closed")
            self._protocol.send_binary(data)
            try:
                await self._flush()
            except ConnectionFailed as exc:
                raise Unavailable(f"the stream broke off: {exc}") from exc

    async def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                await self._stream.send(data, math.inf)

    async def receive(self) -> bytes:
        """The next bytes, b"" when the other side has ended its direction.

        Raises:
            Unavailable: the connection broke.
        """
        try:
            await self._fill()
        except ConnectionFailed as exc:
            raise Unavailable(f"the stream broke off: {exc}") from exc
        return self._received.popleft() if self._received else b""

    async def _fill(self) -> None:
        pinged = False
        while not self._received and not self._ended:
            try:
                data = await self._stream.receive(HEARD_WITHIN_S / 2)
            except ConnectionFailed as exc:
                if pinged or not exc.silence:
                    raise
                pinged = True
                await self._ping()
                continue
            pinged = False
            await self._take(data)

    async def _ping(self) -> None:
        async with self._lock:
            if self._protocol.state is OPEN:
                self._protocol.send_ping(b"")
                await self._flush()

    async def _take(self, data: bytes) -> None:
        async with self._lock:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            self._drain()
            await self._flush()
        if self._protocol.state is CLOSED and not self._ended:
            self._ended = True
            code = self._protocol.close_code
            if code not in {1000, 1001, 1005}:
                reason = self._protocol.close_reason or f"close code {code}"
                raise ConnectionFailed(reason, sent=True)

    def _drain(self) -> None:
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._frame(event)

    def _frame(self, frame: Frame) -> None:
        if frame.opcode not in _DATA:
            return
        self._message_bytes += len(frame.data)
        if frame.data:
            self._received.append(bytes(frame.data))
        if frame.fin:
            self._ended = self._ended or self._message_bytes == 0
            self._message_bytes = 0

    async def aclose(self) -> None:
        """Close both directions."""
        with _aio.finishing(CLOSE_WAIT_S):
            try:
                async with self._lock:
                    if self._protocol.state is OPEN:
                        self._protocol.send_close(1000)
                        await self._flush()
            except ConnectionFailed:
                pass
            finally:
                await self._stream.aclose()


async def open_websocket(
    stream: _aio.Stream, request: Request, address: Address, timeout: float
) -> WebSocket:
    """Shake hands on a fresh connection.

    Raises:
        ConnectionFailed: the connection broke.
        DsecError: the server refused, as its error body says.
    """
    path, _, query = f"{address.prefix}{request.target}".partition("?")
    uri = WebSocketURI(address.tls, address.host, address.port, path, query, None, None)
    protocol = ClientProtocol(uri, max_size=16 << 20)
    hello = protocol.connect()
    hello.headers.update(request.headers)
    protocol.send_request(hello)
    try:
        for data in protocol.data_to_send():
            await stream.send(data, timeout)
        while protocol.handshake_exc is None and protocol.state is not OPEN:
            await _shake(stream, protocol, timeout)
    except BaseException:
        with _aio.finishing(1):
            await stream.aclose()
        raise
    if protocol.handshake_exc is not None:
        await stream.aclose()
        raise _refusal(protocol.handshake_exc)
    return WebSocket(stream, protocol)


async def _shake(stream: _aio.Stream, protocol: ClientProtocol, timeout: float) -> None:
    data = await stream.receive(timeout)
    if data:
        protocol.receive_data(data)
    else:
        protocol.receive_eof()
    if protocol.state is not OPEN:
        protocol.events_received()


def _refusal(exc: BaseException) -> Exception:
    match exc:
        case InvalidStatus():
            return http_error(exc.response.status_code, bytes(exc.response.body or b""))
        case InvalidHandshake():
            return ConnectionFailed(f"no WebSocket: {exc}", sent=True)
        case _:
            return ConnectionFailed(f"the server closed the connection: {exc}", sent=True)
