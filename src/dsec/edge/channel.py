"""The channel to one aether (spec/frames.md): calls and streams over one connection.

Idle it is one object with an empty table: no task if the connection can call back
(`UnixConnection`), else one that reads and one that writes. Everything of a stream is bounded by
credit, so nothing here ever waits for a slow reader of another stream.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import anyio
import anyio.abc
import msgspec
from anyio.abc import ByteStream

from dsec.base.errors import (
    DeadlineExceeded,
    DsecError,
    InternalError,
    PayloadTooLarge,
    RateLimited,
    SandboxGone,
    Unavailable,
)
from dsec.edge.ahead import reading_ahead, swallow
from dsec.edge.calls import Call, Collected, Heard, Sink, error_of
from dsec.edge.charge import Charge
from dsec.edge.connection import UnixConnection
from dsec.edge.patience import Patience
from dsec.edge.pump import Pump
from dsec.wire.frames import (
    HEADER,
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    VERSION,
    FrameError,
    Kind,
)

logger = logging.getLogger("dsec.edge.channel")

MAX_STREAMS = 4096
MAX_STREAM_ID = (1 << 32) - 1
GRANT_BYTES = INITIAL_CREDIT // 4
"""Credit is given back in pieces of this size: few frames, and the sender never runs dry."""
CHUNK_BYTES = 64 * 1024
MAX_PING_BYTES = 16
STALL_S = 1800.0
"""A client that has left cannot always be seen while it has more to say than anybody takes."""
MAX_EVENT_BYTES = 32 << 20
"""Events are not under credit: a stream whose reader lets more than this pile up is given up."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_pack = HEADER.pack
_OPEN, _DATA, _END, _EVENT = Kind.OPEN.value, Kind.DATA.value, Kind.END.value, Kind.EVENT.value
_RESULT, _ERROR, _CREDIT = Kind.RESULT.value, Kind.ERROR.value, Kind.CREDIT.value
_CANCEL, _PING, _PONG = Kind.CANCEL.value, Kind.PING.value, Kind.PONG.value


class Data(NamedTuple):
    """Bytes of one of the stream's channels."""

    channel: int
    data: bytes


class End(NamedTuple):
    """The peer sends no more data on this channel."""

    channel: int


Item = Data | End | dict[str, Any]


class Hello(msgspec.Struct, kw_only=True):
    """What aether says of itself."""

    protocol: int
    version: str = ""
    id: str = ""
    generation: int = 0
    pid: int = 0


class AetherStream:
    """One stream in both directions. Iterate for what comes; `result` is set when that ends."""

    __slots__ = (
        "_channel",
        "_consumed",
        "_credit",
        "_done",
        "_error",
        "_event_bytes",
        "_inbox",
        "_inbox_bytes",
        "_receiving",
        "_sending",
        "id",
        "result",
    )

    def __init__(self, channel: AetherChannel, stream: int) -> None:
        self.id = stream
        self.result: Any = None
        self._channel = channel
        self._inbox: deque[Item] = deque()
        self._inbox_bytes = 0
        self._consumed = 0
        self._event_bytes = 0
        self._credit = INITIAL_CREDIT
        self._done = False
        self._error: DsecError | None = None
        self._receiving: anyio.Event | None = None
        self._sending: anyio.Event | None = None

    async def send(self, data: bytes | memoryview, stall_s: float | None = STALL_S) -> None:
        """Send data on the main channel, waiting for credit.

        A stream that ended with its result takes no more: what is left is dropped, and `over` says so.

        Args:
            data: what to send.
            stall_s: how long to wait without anything being taken; None = for ever.

        Raises:
            SandboxGone, Unavailable: the channel is over. DeadlineExceeded: nothing was taken.
            DsecError: aether ended the stream with it.
        """
        view = memoryview(data)
        while view:
            if not self._credit:
                await self._wait_credit(stall_s)
            if self._is_over():
                return
            size = min(self._credit, CHUNK_BYTES, len(view))
            self._credit -= size
            self._channel.write(_DATA, self.id, bytes(view[:size]))
            view = view[size:]

    async def _wait_credit(self, stall_s: float | None) -> None:
        try:
            with self._channel.within(stall_s, "send"):
                while not self._credit and not self._is_over():
                    self._sending = anyio.Event()
                    await self._sending.wait()
        except DeadlineExceeded:
            message = f"nothing was taken for {stall_s:.0f} s"
            raise DeadlineExceeded(message, seconds=stall_s) from None

    def end(self) -> None:
        """Send no more data on the main channel. No effect on a stream that is over."""
        if not self._done:
            self._channel.write(_END, self.id)

    def cancel(self) -> None:
        """Give up; what still comes of it is thrown away. Harmless twice."""
        if not self._done:
            self._done = True
            self._channel.abandon(self.id)
            self._wake()

    @property
    def over(self) -> bool:
        """Whether its result or error has come; unread items may still be there."""
        return self._done

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        """The next event or piece of data; ends with the result.

        Raises:
            DsecError: aether ended the stream with it, or the channel is over.
        """
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._receiving = anyio.Event()
            await self._receiving.wait()
        item = self._inbox.popleft()
        if type(item) is Data:
            self._give_back(len(item.data))
        if not self._inbox:
            self._event_bytes = 0
        return item

    async def send_all(self, data: AsyncIterator[bytes], stall_s: float | None = STALL_S) -> None:
        """Send what comes, then say that this is all; stops early once the stream is over.

        Raises:
            DsecError: as from `send`.
            Exception: what `data` raises, at once, even while the sandbox takes nothing.
        """
        async with reading_ahead(data) as chunks:
            try:
                async for chunk in chunks:
                    if self._done:
                        break  # if it has failed, `finish` says how
                    await self.send(chunk, stall_s)
            finally:
                if self._done:
                    await swallow(chunks)
        self.end()

    async def finish(self) -> Any:
        """Throw away what still comes and return the result.

        Raises:
            DsecError: as from iterating.
        """
        async for _ in self:
            pass
        return self.result

    def _give_back(self, size: int) -> None:
        self._inbox_bytes -= size
        self._consumed += size
        if self._consumed >= GRANT_BYTES and not self._done:
            self._channel.write(_CREDIT, self.id, self._consumed.to_bytes(4, "big"))
            self._consumed = 0

    def _is_over(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._done

    def _wake(self) -> None:
        for event in (self._receiving, self._sending):
            if event is not None:
                event.set()
        self._receiving = self._sending = None

    def push(self, kind: int, channel: int, payload: bytes) -> None:
        """Take a frame (called by the channel)."""
        if kind == _DATA:
            self._inbox_bytes += len(payload)
            if self._inbox_bytes + self._consumed > INITIAL_CREDIT:
                raise FrameError("more data than credit")
            self._inbox.append(Data(channel, payload))
        elif kind == _EVENT:
            self._take_event(payload)
        elif kind == _END:
            self._inbox.append(End(channel))
        elif kind == _CREDIT:
            self._credit += int.from_bytes(payload[:4], "big")
        elif kind == _RESULT:
            self.result = _decode(payload) if payload else None
            self._done = True
        else:
            self._error = error_of(payload)
            self._done = True
        self._wake()

    def _take_event(self, payload: bytes) -> None:
        self._event_bytes += len(payload)
        if self._event_bytes > MAX_EVENT_BYTES:
            self.cancel()
            self._error = RateLimited("events came faster than they were read", retry_after_s=1)
        else:
            self._inbox.append(_decode(payload))

    def fail(self, error: DsecError) -> None:
        """The channel is over (called by the channel)."""
        self._error = error
        self._done = True
        self._wake()


class AetherChannel:
    """One connection to an aether."""

    __slots__ = (
        "_buffer",
        "_error",
        "_next",
        "_on_lost",
        "_patience",
        "_sinks",
        "_stream",
        "_writer",
        "hello",
    )

    def __init__(self, on_lost: Callable[[AetherChannel], None] | None = None) -> None:
        """Make a channel that is not connected yet.

        Args:
            on_lost: called once when the connection ends; it then has to `close` the channel with
                the error that open streams shall end with. Without it they end as Unavailable.
        """
        self.hello = Hello(protocol=0)
        self._buffer = bytearray()
        self._next = 0
        self._sinks: dict[int, Sink] = {}
        self._error: DsecError | None = None
        self._on_lost = on_lost
        self._stream: ByteStream | None = None
        self._writer: Callable[[bytes], None] | None = None
        self._patience = Patience()

    async def start(self, stream: ByteStream, group: anyio.abc.TaskGroup) -> None:
        """Speak on a fresh connection and say hello.

        Args:
            stream: the connection; the channel closes it.
            group: parent of the tasks a stream that cannot call back needs.

        Raises:
            Unavailable: the connection ended. InternalError: aether speaks another protocol.
        """
        self._stream = stream
        if isinstance(stream, UnixConnection):
            self._writer = stream.write
            stream.attach(self._feed, self._lost)
        else:
            pump = Pump(stream)
            self._writer = pump.write
            group.start_soon(pump.run_reader, self._feed, self._lost)
            group.start_soon(pump.run_writer)
        answer = await self.collect("hello", {"protocol": VERSION})
        self.hello = msgspec.msgpack.decode(answer.result, type=Hello, strict=False)
        if self.hello.protocol != VERSION:
            self.close()
            raise InternalError(f"aether speaks protocol {self.hello.protocol}, not {VERSION}")

    def within(self, seconds: float | None, what: str) -> AbstractContextManager[None]:
        """Bound the waiting for the sandbox by time in which it was not paused; None = not at all.

        Raises:
            DeadlineExceeded: it took longer.
        """
        if seconds is None:
            return contextlib.nullcontext()
        return self._patience.within(seconds, what)

    def hold(self) -> None:
        """The sandbox is being paused: what is open waits, and its time does not count."""
        self._patience.hold()

    def release(self) -> None:
        """The sandbox runs again."""
        self._patience.release()

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._error is not None

    @property
    def busy(self) -> bool:
        """Whether a stream is open."""
        return bool(self._sinks)

    async def call(self, method: str, args: dict[str, Any] | None = None) -> Any:
        """Ask, and wait for the result. Cancelled, it tells aether to give up.

        Raises:
            DsecError: aether's answer, or SandboxGone, Unavailable if the channel is over.
        """
        payload = (await self.collect(method, args)).result
        return _decode(payload) if payload else None

    async def collect(
        self, method: str, args: dict[str, Any] | None = None, charge: Charge | None = None
    ) -> Collected:
        """As `call`, but all that came, as it came.

        Args:
            method: what to ask for.
            args: its arguments.
            charge: holds what came, for the caller to release; else it is held only while it comes.

        Raises:
            DsecError: aether's answer, or SandboxGone, Unavailable if the channel is over.
                RateLimited: answers on their way take too much memory.
        """
        own = charge or Charge()
        call = Call(self, self._next + 1, own)
        self._open(call, method, args)
        try:
            await call.event.wait()
        except BaseException:
            self.abandon(call.id)
            raise
        finally:
            if charge is None:
                own.release()
        if call.error is not None:
            raise call.error
        return call.collected

    def hear(
        self, method: str, args: dict[str, Any], then: Callable[[Heard], None], keep_bytes: int
    ) -> None:
        """Ask, and be told when it is over, without a task that waits.

        Args:
            method: what to ask for.
            args: its arguments.
            then: called once, from the event loop; it must not fail.
            keep_bytes: how much of each channel's data to keep.

        Raises:
            SandboxGone, Unavailable: the channel is over. RateLimited: too many streams.
        """
        self._open(Heard(self, self._next + 1, then, keep_bytes), method, args)

    def open(self, method: str, args: dict[str, Any] | None = None) -> AetherStream:
        """Open a stream; leave its context or `cancel` it to give it up.

        Raises:
            SandboxGone, Unavailable: the channel is over. RateLimited: too many streams.
        """
        stream = AetherStream(self, self._next + 1)
        self._open(stream, method, args)
        return stream

    def close(self, error: DsecError | None = None) -> None:
        """End the connection; every open stream fails with `error`."""
        if self._error is None:
            self._fail(error or Unavailable("the channel was closed"))
        if isinstance(self._stream, UnixConnection):
            self._stream.close()
        elif self._stream is not None and self._writer is not None:
            self._writer(b"")

    def write(self, kind: int, stream: int, payload: bytes = b"", channel: int = 0) -> None:
        """Send one frame (used by streams)."""
        if self._writer is not None and self._error is None:
            self._writer(_pack(len(payload), stream, VERSION, kind, channel) + payload)

    def abandon(self, stream: int) -> None:
        """Cancel a stream and forget it (used by streams)."""
        if self._sinks.pop(stream, None) is not None:
            self.write(_CANCEL, stream)

    def _open(self, sink: Sink, method: str, args: dict[str, Any] | None) -> None:
        if self._error is not None:
            raise self._error
        if len(self._sinks) >= MAX_STREAMS:
            raise RateLimited(f"{MAX_STREAMS} operations are open on this sandbox", retry_after_s=1)
        if self._next >= MAX_STREAM_ID:
            self.close(Unavailable("the channel has used up its stream ids"))
            raise Unavailable("the channel has used up its stream ids")
        payload = _encode({**(args or {}), "m": method})
        if len(payload) > MAX_PAYLOAD:
            raise PayloadTooLarge(
                f"the arguments of {method} take {len(payload)} bytes; the limit is {MAX_PAYLOAD}",
                limit=MAX_PAYLOAD,
            )
        self._next += 1
        self._sinks[self._next] = sink
        self.write(_OPEN, self._next, payload)

    def _feed(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= HEADER.size:
                size, stream, version, kind, channel = HEADER.unpack_from(buffer, at)
                _check_header(version, size)
                begin = at + HEADER.size
                end = begin + size
                if len(buffer) < end:
                    break
                at = end
                self._dispatch(stream, kind, channel, bytes(buffer[begin:end]))
        except Exception as exc:  # whatever it said: nesting without end is a RecursionError
            logger.exception("aether broke the protocol")
            buffer.clear()
            self.close(Unavailable(f"the channel broke: {exc}"))
            return
        del buffer[:at]

    def _dispatch(self, stream: int, kind: int, channel: int, payload: bytes) -> None:
        if kind == _PING:
            if len(payload) > MAX_PING_BYTES:
                raise FrameError(f"a ping of {len(payload)} bytes")
            self.write(_PONG, 0, payload)
            return
        # An unknown stream is one that was given up: what was on its way is thrown away.
        sink = self._sinks.get(stream)
        if sink is None:
            return
        sink.push(kind, channel, payload)
        # Only now: if the frame makes no sense, the stream has to be among those told of the end.
        if kind in (_RESULT, _ERROR):
            self._sinks.pop(stream, None)

    def _lost(self) -> None:
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(self)
        elif self._error is None:
            self._fail(Unavailable("the connection to the sandbox ended"))

    def _fail(self, error: DsecError) -> None:
        self._error = error
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(error)


def _check_header(version: int, size: int) -> None:
    if version != VERSION or size > MAX_PAYLOAD:
        raise FrameError(f"bad header: version {version}, size {size}")


def gone(sandbox: str, reason: str, detail: str = "") -> SandboxGone:
    """The error for whoever was talking to a sandbox that is over."""
    more = f": {detail}" if detail else ""
    return SandboxGone(
        f"sandbox {sandbox} is over ({reason}){more}", reason=reason, sandbox=sandbox
    )
