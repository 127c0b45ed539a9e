"""The other end of a channel, by hand: reads the edge's frames, says what a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import ByteStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from typing_extensions import override

from dsec.edge.channel import AetherChannel
from dsec.wire.frames import VERSION, Decoder, Frame, Kind, encode

HELLO = {"protocol": VERSION, "version": "t", "id": "sbx", "generation": 1, "pid": 1}


class Pipe(ByteStream):
    """A ByteStream in memory."""

    def __init__(
        self, to: MemoryObjectSendStream[bytes], come_from: MemoryObjectReceiveStream[bytes]
    ) -> None:
        self._to = to
        self._from = come_from

    @override
    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._from.receive()

    @override
    async def send(self, item: bytes) -> None:
        await self._to.send(item)

    @override
    async def send_eof(self) -> None:
        await self._to.aclose()

    @override
    async def aclose(self) -> None:
        await self._to.aclose()
        await self._from.aclose()


class Peer:
    def __init__(self, stream: Pipe) -> None:
        self.stream = stream
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    async def frame(self) -> Frame:
        while not self._frames:
            self._frames += self._decoder.feed(await self.stream.receive())
        return self._frames.pop(0)

    async def opened(self) -> tuple[int, dict[str, Any]]:
        frame = await self.frame()
        assert frame.kind is Kind.OPEN
        return frame.stream, msgspec.msgpack.decode(frame.payload)

    async def say(self, kind: Kind, stream: int, body: object = None, channel: int = 0) -> None:
        payload = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
        await self.stream.send(encode(Frame(kind, stream, payload, channel)))

    async def answer(self, body: object = None) -> dict[str, Any]:
        stream, args = await self.opened()
        await self.say(Kind.RESULT, stream, body)
        return args


def pipes() -> tuple[Pipe, Pipe]:
    to_peer, at_peer = anyio.create_memory_object_stream[bytes](1000)
    to_edge, at_edge = anyio.create_memory_object_stream[bytes](1000)
    return Pipe(to_peer, at_edge), Pipe(to_edge, at_peer)


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[AetherChannel, Peer]]:
    ours, theirs = pipes()
    peer, channel = Peer(theirs), AetherChannel()
    async with anyio.create_task_group() as group:
        group.start_soon(channel.start, ours, group)
        assert (await peer.answer(HELLO))["m"] == "hello"
        while channel.hello.protocol == 0:
            await anyio.lowlevel.checkpoint()
        yield channel, peer
        channel.close()
        await peer.stream.aclose()
        group.cancel_scope.cancel()
