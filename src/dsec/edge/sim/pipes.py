"""Byte pipes in memory: the standard streams, ports and channels of the simulation.

Same manners as the kernel's: bounded, an empty read is the end, writing to a pipe nobody reads
fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc
from typing_extensions import override

T = TypeVar("T")
PIPE_BYTES = 65536


class BrokenPipe(Exception):
    """Nobody will read what was written; a program that meets it dies of SIGPIPE."""


class Changed:
    """A condition without a lock: whoever waits is woken by the next change."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake all that wait now."""
        event, self._event = self._event, anyio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next change."""
        await self._event.wait()


class Mailbox(Generic[T]):
    """Things on their way to one reader, who ends when it is closed and empty."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = Changed()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Put one in; there is no limit but the sender's own."""
        self._items.append(item)
        self._changed.notify()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._changed.notify()

    def __aiter__(self) -> Mailbox[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items and not self._closed:
            await self._changed.wait()
        if not self._items:
            raise StopAsyncIteration
        await anyio.lowlevel.checkpoint()
        return self._items.popleft()


class BytePipe:
    """One direction of bytes between two simulated parties."""

    def __init__(self, limit: int = PIPE_BYTES) -> None:
        self._limit = limit
        self._data = bytearray()
        self._changed = Changed()
        self._writing = True
        self._reading = True

    async def write(self, data: bytes) -> None:
        """Write all of it, waiting while the pipe is full.

        Raises:
            BrokenPipe: the reader has gone.
        """
        rest = memoryview(data)
        while True:
            if not self._reading or not self._writing:
                raise BrokenPipe
            room = self._limit - len(self._data)
            if room > 0:
                self._data += rest[:room]
                rest = rest[room:]
                self._changed.notify()
            if not rest:
                break
            await self._changed.wait()
        await anyio.lowlevel.checkpoint()

    async def read(self, most: int = PIPE_BYTES) -> bytes:
        """Read what is there, waiting for the first byte; empty = the writer has gone."""
        while not self._data and self._writing and self._reading:
            await self._changed.wait()
        taken = bytes(self._data[:most])
        del self._data[:most]
        self._changed.notify()
        await anyio.lowlevel.checkpoint()
        return taken

    def close_writer(self) -> None:
        """No more will be written; what is there can still be read."""
        self._writing = False
        self._changed.notify()

    def close_reader(self) -> None:
        """No more will be read."""
        self._reading = False
        self._data.clear()
        self._changed.notify()


class MemoryStream(anyio.abc.ByteStream):
    """One end of a connection in memory."""

    def __init__(self, incoming: BytePipe, outgoing: BytePipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    @override
    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive some bytes.

        Raises:
            EndOfStream: the peer has ended. ClosedResourceError: this end is closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        data = await self._incoming.read(max_bytes)
        if data:
            return data
        if self._closed:
            raise anyio.ClosedResourceError
        raise anyio.EndOfStream

    @override
    async def send(self, item: bytes) -> None:
        """Send all of it.

        Raises:
            BrokenResourceError: the peer has closed. ClosedResourceError: this end is closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            await self._outgoing.write(item)
        except BrokenPipe:
            raise anyio.BrokenResourceError from None

    @override
    async def send_eof(self) -> None:
        """End this direction; the other stays open."""
        self._outgoing.close_writer()
        await anyio.lowlevel.checkpoint()

    @override
    async def aclose(self) -> None:
        """Close both directions."""
        self.abort()
        await anyio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Close both directions without a checkpoint."""
        self._closed = True
        self._outgoing.close_writer()
        self._incoming.close_reader()

    @property
    @override
    def extra_attributes(self) -> Mapping[Any, Any]:
        """There are none."""
        return {}


def memory_pair(limit: int = PIPE_BYTES) -> tuple[MemoryStream, MemoryStream]:
    """Two connected ends."""
    there, back = BytePipe(limit), BytePipe(limit)
    return MemoryStream(back, there), MemoryStream(there, back)
