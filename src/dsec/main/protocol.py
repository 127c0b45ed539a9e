"""uvicorn's HTTP protocol with bounds on what a peer without a key can make us keep."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of a request's address and headers. The parser itself has no limit and keeps what it is sent."""
HEAD_TIMEOUT_S = 30.0
"""For a whole head to arrive."""


class HeadTooLarge(Exception):
    """Ends the parsing; httptools wraps it, and uvicorn then refuses the request."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _in_head = True
    _begun = 0
    _waiting_bytes = 0
    _too_large = False
    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._arm()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._disarm()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        """Some bytes of it."""
        if self.transport.is_closing():
            return
        begun = self._begun
        super().data_received(data)
        # The piece a head begins in may hold much of what was before it; it is not counted.
        if self._in_head and self._begun == begun:
            self._waiting_bytes += len(data)
            if self._waiting_bytes > MAX_HEAD_BYTES:
                self._too_large = True
                self.send_400_response("")

    @override
    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        self._begun += 1
        self._waiting_bytes = 0
        self._arm()

    @override
    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._in_head = False
        self._disarm()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._too_large = True
            raise HeadTooLarge
        super().on_headers_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        """Refuse it, and close."""
        if not self._too_large:
            super().send_400_response(msg)
            return
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        self.transport.write(f"{head}content-length: 0\r\nconnection: close\r\n\r\n".encode())
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self.transport.close()
