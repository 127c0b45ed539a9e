# Generated from ../_async by tools/unasync.py; do not edit.
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
from dsec.sdk import _blocking
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

    def __init__(self, stream: _blocking.Stream, protocol: ClientProtocol) -> None:
        self._stream = stream
        self._protocol = protocol
        self._lock = _blocking.Lock()
        self._received: deque[bytes] = deque()
        self._message_bytes = 0
        self._ended = False
        self._drain()  # data may have come together with the handshake

    def send(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            Unavailable: the connection is gone.
        """
        for start in range(0, len(data), MESSAGE_BYTES):
            self._send(data[start : start + MESSAGE_BYTES])

    def send_eof(self) -> None:
        """Say that no more will be sent; receiving goes on."""
        self._send(b"")

    def _send(self, data: bytes) -> None:
        with self._lock:
            if self._protocol.state is not OPEN:
                raise Unavailable("the stream is closed")
            self._protocol.send_binary(data)
            try:
                self._flush()
            except ConnectionFailed as exc:
                raise Unavailable(f"the stream broke off: {exc}") from exc

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._stream.send(data, math.inf)

    def receive(self) -> bytes:
        """The next bytes, b"" when the other side has ended its direction.

        Raises:
            Unavailable: the connection broke.
        """
        try:
            self._fill()
        except ConnectionFailed as exc:
            raise Unavailable(f"the stream broke off: {exc}") from exc
        return self._received.popleft() if self._received else b""

    def _fill(self) -> None:
        pinged = False
        while not self._received and not self._ended:
            try:
                data = self._stream.receive(HEARD_WITHIN_S / 2)
            except ConnectionFailed as exc:
                if pinged or not exc.silence:
                    raise
                pinged = True
                self._ping()
                continue
            pinged = False
            self._take(data)

    def _ping(self) -> None:
        with self._lock:
            if self._protocol.state is OPEN:
                self._protocol.send_ping(b"")
                self._flush()

    def _take(self, data: bytes) -> None:
        with self._lock:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            self._drain()
            self._flush()
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

    def close(self) -> None:
        """Close both directions."""
        with _blocking.finishing(CLOSE_WAIT_S):
            try:
                with self._lock:
                    if self._protocol.state is OPEN:
                        self._protocol.send_close(1000)
                        self._flush()
            except ConnectionFailed:
                pass
            finally:
                self._stream.close()


def open_websocket(
    stream: _blocking.Stream, request: Request, address: Address, timeout: float
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
            stream.send(data, timeout)
        while protocol.handshake_exc is None and protocol.state is not OPEN:
            _shake(stream, protocol, timeout)
    except BaseException:
        with _blocking.finishing(1):
            stream.close()
        raise
    if protocol.handshake_exc is not None:
        stream.close()
        raise _refusal(protocol.handshake_exc)
    return WebSocket(stream, protocol)


def _shake(stream: _blocking.Stream, protocol: ClientProtocol, timeout: float) -> None:
    data = stream.receive(timeout)
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
            return ConnectionFailed(
                f"the server closed the connection: {exc}", sent=True
            )
