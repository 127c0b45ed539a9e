"""Calls over a channel (spec/frames.md): streams that are read to their end before anyone looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import anyio
import msgspec
from typing_extensions import override

from dsec.base.errors import DsecError, PayloadTooLarge, RateLimited, Unavailable, error_from
from dsec.edge.charge import Charge
from dsec.wire.frames import Kind

MAX_COLLECTED_BYTES = 160 << 20
"""Of one call: a run may keep 64 MiB of each of its two streams."""

_DATA, _EVENT = Kind.DATA.value, Kind.EVENT.value
_RESULT, _ERROR, _CREDIT = Kind.RESULT.value, Kind.ERROR.value, Kind.CREDIT.value


class Way(Protocol):
    """The channel, as a call needs it."""

    def write(self, kind: int, stream: int, payload: bytes) -> None:
        """Send a frame."""
        ...

    def abandon(self, stream: int) -> None:
        """Have the peer stop a stream nobody listens to any more."""
        ...


class Sink(Protocol):
    """Where the frames of one stream go."""

    def push(self, kind: int, channel: int, payload: bytes) -> None:
        """Take a frame."""
        ...

    def fail(self, error: DsecError) -> None:
        """Nothing comes any more."""
        ...


class Collected(NamedTuple):
    """All that came of a call."""

    result: bytes
    """MessagePack."""
    data: dict[int, bytearray]
    """By channel: what was too large for the result."""
    more: list[bytes]
    """Payloads of the events before the result, for lists too long for one frame."""


class Call:
    """A stream that is read to its end before anyone looks; its data is acknowledged at once."""

    __slots__ = ("_channel", "_charge", "collected", "error", "event", "id", "size")

    def __init__(self, channel: Way, stream: int, charge: Charge) -> None:
        self._channel = channel
        self._charge = charge
        self.id = stream
        self.event = anyio.Event()
        self.collected = Collected(b"", {}, [])
        self.error: DsecError | None = None
        self.size = 0

    def push(self, kind: int, channel: int, payload: bytes) -> None:
        """See `Sink`."""
        if kind == _RESULT:
            self.collected = self.collected._replace(result=payload)
            self.event.set()
        elif kind == _ERROR:
            self.fail(error_of(payload))
        elif kind in (_DATA, _EVENT):
            self._take(kind, channel, payload)

    def _take(self, kind: int, channel: int, payload: bytes) -> None:
        self.size += len(payload)
        try:
            self._charge.take(len(payload))
        except RateLimited as exc:
            self._give_up(exc)
            return
        if self.size > MAX_COLLECTED_BYTES:
            self._give_up(PayloadTooLarge(f"the answer is over {MAX_COLLECTED_BYTES} bytes"))
        elif kind == _DATA:
            self.collected.data.setdefault(channel, bytearray()).extend(payload)
            self._channel.write(_CREDIT, self.id, len(payload).to_bytes(4, "big"))
        else:
            self.collected.more.append(payload)

    def _give_up(self, error: DsecError) -> None:
        self._channel.abandon(self.id)
        self.fail(error)

    def fail(self, error: DsecError) -> None:
        """See `Sink`."""
        self.error = error
        self.event.set()


class Heard(Call):
    """A call nobody waits for: `then` is told when it is over. Of its data both ends are kept."""

    __slots__ = ("_then", "dropped")

    def __init__(
        self, channel: Way, stream: int, then: Callable[[Heard], None], keep_bytes: int
    ) -> None:
        super().__init__(channel, stream, Charge())
        self._then = then
        self.size = keep_bytes
        """Of each channel's data, at most: half of it from either end."""
        self.dropped: dict[int, int] = {}

    @override
    def push(self, kind: int, channel: int, payload: bytes) -> None:
        """See `Sink`."""
        super().push(kind, channel, payload)
        if kind == _RESULT:
            self._then(self)

    @override
    def _take(self, kind: int, channel: int, payload: bytes) -> None:
        if kind != _DATA:
            return
        kept = self.collected.data.setdefault(channel, bytearray())
        kept += payload
        half = self.size // 2
        if (over := len(kept) - 2 * half) > 0:
            del kept[half : half + over]
            self.dropped[channel] = self.dropped.get(channel, 0) + over
        self._channel.write(_CREDIT, self.id, len(payload).to_bytes(4, "big"))

    @override
    def fail(self, error: DsecError) -> None:
        """See `Sink`."""
        super().fail(error)
        self._then(self)


class _ErrorPayload(msgspec.Struct):
    code: str = "internal_error"
    message: str = ""
    step: str | None = None
    path: Any = None
    errno: int | None = None
    kind: str | None = None


_error_decoder = msgspec.msgpack.Decoder(_ErrorPayload, strict=False)


def error_of(payload: bytes) -> DsecError:
    """What aether says went wrong."""
    got = _error_decoder.decode(payload)
    path = got.path.decode("utf-8", "replace") if isinstance(got.path, bytes) else got.path
    if got.code == "cancelled":
        return Unavailable(got.message or "the operation was cancelled")
    details = {"step": got.step, "path": path, "errno": got.errno, "kind": got.kind}
    return error_from(got.code, got.message, {k: v for k, v in details.items() if v is not None})
