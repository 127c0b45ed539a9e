"""A Unix socket that calls back instead of being read: no task and no buffer while it is quiet.

An AnyIO stream needs a task waiting in `receive`; with thousands of idle sandboxes that is most of
what an edge would hold. Servers run on asyncio, so its transport is used here, and only here; the
object is still a ByteStream for whoever wants one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

import anyio
from anyio.abc import ByteStream
from typing_extensions import override

logger = logging.getLogger("dsec.edge.connection")

MAX_QUEUED_BYTES = 64 << 20
"""Credit bounds what is sent to a peer that keeps the protocol. One that does not (it asks and never
reads, or gives credit without end) is let go at this much, before the edge's memory is."""


class UnixConnection(asyncio.Protocol, ByteStream):
    """A connected Unix stream socket, pushed or pulled."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._on_data: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._early: list[bytes] = []
        self._lost = False
        self._wake: asyncio.Event | None = None

    @classmethod
    async def open(cls, sock: socket.socket) -> UnixConnection:
        """Take over a connected socket."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, sock=sock)
        return connection

    def attach(self, on_data: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        """From now on call back; what came before comes first."""
        self._on_data, self._on_lost = on_data, on_lost
        early, self._early = self._early, []
        for data in early:
            on_data(data)
        if self._lost:
            on_lost()

    def write(self, data: bytes) -> None:
        """Send, or queue if the socket is full; a peer that lets too much pile up is let go."""
        if self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            logger.error("the peer does not read; its connection is ended")
            self.close()

    def close(self) -> None:
        """Close now; `on_lost` is called soon after."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    @override
    def data_received(self, data: bytes) -> None:
        if self._on_data is not None:
            self._on_data(data)
            return
        self._early.append(data)
        self._signal()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._transport = None
        if self._on_lost is not None:
            self._on_lost()
        self._on_data = self._on_lost = None
        self._signal()

    def _signal(self) -> None:
        if self._wake is not None:
            self._wake.set()

    # ByteStream

    @override
    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._early:
            if self._lost:
                raise anyio.EndOfStream
            self._wake = asyncio.Event()
            await self._wake.wait()
        data = self._early.pop(0)
        if len(data) > max_bytes:
            self._early.insert(0, data[max_bytes:])
        return data[:max_bytes]

    @override
    async def send(self, item: bytes) -> None:
        if self._transport is None:
            raise anyio.BrokenResourceError
        self.write(item)

    @override
    async def send_eof(self) -> None:
        if self._transport is not None:
            self._transport.write_eof()

    @override
    async def aclose(self) -> None:
        self.close()
