"""The serving side of spec/frames.md: one connection, its streams, their credit."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.abc
import msgspec

from dsec.edge.sim.errors import AetherError, invalid
from dsec.edge.sim.pipes import Changed, Mailbox
from dsec.wire.frames import (
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    Channel,
    Decoder,
    Frame,
    FrameError,
    Kind,
    encode,
)

logger = logging.getLogger("dsec.edge.sim")

MAX_STREAMS = 4096
CHUNK = 65536
QUEUED_FRAMES = 64
"""Frames of one connection that wait for the peer to read; then whoever sends waits."""
Arguments = Mapping[str, Any]
Handler = Callable[["Stream", Arguments], Awaitable[object]]


class Stream:
    """One call as its handler sees it."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.id = number
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()
        self._connection = connection
        self._may_send = INITIAL_CREDIT
        self._granted = INITIAL_CREDIT
        self._inbox: list[bytes] = []
        self._ended = False
        self._changed = Changed()

    async def event(self, body: Mapping[str, object]) -> None:
        """Send an EVENT."""
        await self._send(Kind.EVENT, msgspec.msgpack.encode(body))

    async def data(self, data: bytes, channel: int = Channel.MAIN) -> None:
        """Send all of it, as the peer grants credit."""
        at = 0
        while at < len(data):
            size = min(await self.room(), CHUNK, len(data) - at)
            await self.spend(data[at : at + size], channel)
            at += size

    async def room(self) -> int:
        """Wait until something may be sent, and say how much."""
        while self._may_send <= 0:
            await self._changed.wait()
        return self._may_send

    async def spend(self, data: bytes, channel: int) -> None:
        """Send data that `room` has allowed."""
        self._may_send -= len(data)
        await self._send(Kind.DATA, data, channel)

    async def end(self) -> None:
        """Say that no more data comes."""
        await self._send(Kind.END)

    async def incoming(self) -> AsyncIterator[bytes]:
        """The peer's data until it ends; credit is given back as it is taken."""
        while True:
            while not self._inbox and not self._ended:
                await self._changed.wait()
            if not self._inbox:
                return
            data = self._inbox.pop(0)
            yield data
            self._granted += len(data)
            await self._send(Kind.CREDIT, len(data).to_bytes(4, "big"))

    async def finish(self, result: object) -> None:
        """Send the RESULT."""
        payload = msgspec.msgpack.encode(result)
        if len(payload) > MAX_PAYLOAD:
            await self.fail(AetherError("internal_error", "the result is too large for a frame"))
        else:
            await self._send(Kind.RESULT, payload)

    async def fail(self, error: AetherError) -> None:
        """Send the ERROR."""
        await self._send(Kind.ERROR, msgspec.msgpack.encode(error.as_map()))

    async def _send(self, kind: Kind, payload: bytes = b"", channel: int = 0) -> None:
        await self._connection.send(Frame(kind, self.id, payload, channel))

    def take(self, frame: Frame) -> None:
        """A frame from the peer.

        Raises:
            FrameError: it sends more than it may.
        """
        if frame.kind == Kind.DATA:
            self._granted -= len(frame.payload)
            if self._granted < 0:
                raise FrameError("more data than credit")
            self._inbox.append(frame.payload)
        elif frame.kind == Kind.END:
            self._ended = True
        elif frame.kind == Kind.CREDIT:
            self._may_send += int.from_bytes(frame.payload, "big")
        elif frame.kind == Kind.CANCEL:
            self.scope.cancel()
        self._changed.notify()


class Connection:
    """One connection: reads frames, starts handlers, writes whole frames."""

    def __init__(
        self,
        stream: anyio.abc.ByteStream,
        methods: Mapping[str, Handler],
        gate: Callable[[], Awaitable[None]],
    ) -> None:
        """Make one.

        Args:
            stream: to the peer.
            methods: what can be called.
            gate: passed before anything is taken or said.
        """
        self._stream = stream
        self._gate = gate
        self._methods = methods
        self._streams: dict[int, Stream] = {}
        self._scope = anyio.CancelScope()
        self._queue: Mailbox[bytes] = Mailbox()
        self._drained = Changed()
        self._sending = False

    async def serve(self) -> None:
        """Serve until either side closes."""
        with self._scope:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._write)
                    await self._read(group)
                    group.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stream.aclose()

    def drop(self) -> None:
        """End it now."""
        self._scope.cancel()

    async def flush(self) -> None:
        """Wait until what has been queued is with the peer."""
        while len(self._queue) or self._sending:
            await self._drained.wait()

    async def send(self, frame: Frame) -> None:
        """Queue a frame; a cancelled sender never leaves half of one."""
        while len(self._queue) >= QUEUED_FRAMES:
            await self._drained.wait()
        self._queue.put(encode(frame))

    async def _write(self) -> None:
        try:
            async for data in self._queue:
                self._sending = True
                await self._gate()
                await self._stream.send(data)
                self._sending = False
                self._drained.notify()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.drop()

    async def _read(self, group: anyio.abc.TaskGroup) -> None:
        decoder = Decoder()
        try:
            while True:
                data = await self._stream.receive()
                await self._gate()
                for frame in decoder.feed(data):
                    await self._dispatch(frame, group)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return
        except FrameError:
            return  # a broken peer is disconnected

    async def _dispatch(self, frame: Frame, group: anyio.abc.TaskGroup) -> None:
        if frame.kind == Kind.PING:
            await self.send(Frame(Kind.PONG, 0, frame.payload))
        elif frame.kind == Kind.OPEN:
            await self._open(frame, group)
        elif stream := self._streams.get(frame.stream):
            stream.take(frame)

    async def _open(self, frame: Frame, group: anyio.abc.TaskGroup) -> None:
        stream = Stream(self, frame.stream)
        if frame.stream == 0 or frame.stream in self._streams:
            raise FrameError(f"stream {frame.stream} cannot be opened")
        if len(self._streams) >= MAX_STREAMS:
            await stream.fail(AetherError("conflict", f"{MAX_STREAMS} streams are open"))
            return
        self._streams[frame.stream] = stream
        group.start_soon(self._serve_stream, stream, frame.payload)

    async def _serve_stream(self, stream: Stream, payload: bytes) -> None:
        try:
            answer = await self._answer(stream, payload)
        except AetherError as error:
            await stream.fail(error)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            await stream.fail(invalid(str(error)))
        except Exception as error:  # the protocol boundary: one bad call ends only itself
            logger.exception("simulated method failed")
            await stream.fail(AetherError("internal_error", f"simulation: {error!r}"))
        else:
            await stream.finish(answer)
        finally:
            del self._streams[stream.id]
            stream.over.set()

    async def _answer(self, stream: Stream, payload: bytes) -> object:
        arguments = msgspec.msgpack.decode(payload, type=dict[str, Any])
        method = arguments.pop("m", "")
        handler = self._methods.get(method)
        if handler is None:
            raise AetherError("unsupported", f"no method {method!r}")
        answer: object = None
        with stream.scope:
            answer = await handler(stream, arguments)
        if stream.scope.cancelled_caught:
            raise AetherError("cancelled", "cancelled by the edge")
        return answer
