"""Byte streams of the proxy: looked into first, then joined."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from anyio.abc import ByteStream, SocketAttribute
from typing_extensions import override

CHUNK_BYTES = 64 * 1024
BROKEN = (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What ends a connection from outside."""
_CLOSED = (OSError, ValueError, LookupError)
"""What touching a socket raises that is closed already, by event loop."""
_RESET = struct.pack("ii", 1, 0)


class Peekable(ByteStream):
    """A stream whose received bytes can be given back."""

    def __init__(self, stream: ByteStream) -> None:
        """Take a stream over; closing this closes it."""
        self._stream = stream
        self._ahead = b""

    @property
    @override
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._stream.extra_attributes

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
    """Have the closing of a connection tell its peer that it broke; if it is closed, it has."""
    with contextlib.suppress(*_CLOSED):
        raw = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 - no Django
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def has_something(stream: ByteStream) -> bool:
    """Whether bytes or the end have come that nobody has received."""
    poll = select.poll()
    try:
        poll.register(stream.extra(SocketAttribute.raw_socket), select.POLLIN)  # noqa: S610
    except _CLOSED:
        return True
    return bool(poll.poll(0))


async def join(here: ByteStream, there: ByteStream, idle_s: float) -> None:
    """Copy both ways until both have ended, or nothing came for so long.

    One direction's end is passed on while the other goes on. What one side does not take, the other
    side does not get to send. What breaks off on one side breaks off on the other: it must not
    look like all there was.
    """
    with anyio.move_on_after(idle_s) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_copy, here, there, scope, idle_s)
            tasks.start_soon(_copy, there, here, scope, idle_s)
    if scope.cancelled_caught:
        reset_on_close(here)
        reset_on_close(there)


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
