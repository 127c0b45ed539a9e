"""Byte streams of the proxy: looked into first, then joined."""

from __future__ import annotations

import socket
import struct

import anyio
from anyio.abc import ByteStream, SocketAttribute
from typing_extensions import override

CHUNK_BYTES = 64 * 1024
BROKEN = (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What ends a connection from outside."""
_RESET = struct.pack("ii", 1, 0)


class Peekable(ByteStream):
    """A stream whose received bytes can be given back."""

    def __init__(self, stream: ByteStream) -> None:
        """Take a stream over; closing this closes it."""
        self._stream = stream
        self._ahead = b""

    def unread(self, data: bytes) -> None:
        """Have bytes received again, before all else."""
        self._ahead = data + self._ahead

    @override
    async def receive(self, max_bytes: int = CHUNK_BYTES) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:max_bytes], self._ahead[max_bytes:]
            return data
        return await self._stream.receive(max_bytes)

    @override
    async def send(self, item: bytes) -> None:
        await self._stream.send(item)

    @override
    async def send_eof(self) -> None:
        await self._stream.send_eof()

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()


def reset_on_close(stream: ByteStream) -> None:
    """Have the closing of a socket tell its peer that the connection was not let through."""
    raw = stream.extra(SocketAttribute.raw_socket, None)  # noqa: S610 - no Django
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


async def join(here: ByteStream, there: ByteStream, idle_s: float) -> None:
    """Copy both ways until both have ended, or nothing came for so long.

    One direction's end is passed on while the other goes on. What one side does not take, the other
    side does not get to send.
    """
    with anyio.move_on_after(idle_s) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_copy, here, there, scope, idle_s)
            tasks.start_soon(_copy, there, here, scope, idle_s)


async def _copy(
    source: ByteStream, sink: ByteStream, scope: anyio.CancelScope, idle_s: float
) -> None:
    try:
        while True:
            data = await source.receive(CHUNK_BYTES)
            scope.deadline = anyio.current_time() + idle_s
            await sink.send(data)
    except anyio.EndOfStream:
        await _end(sink, scope)
    except BROKEN:
        scope.cancel()


async def _end(sink: ByteStream, scope: anyio.CancelScope) -> None:
    try:
        await sink.send_eof()
    except (*BROKEN, NotImplementedError):  # TLS has no end of one direction
        scope.cancel()
