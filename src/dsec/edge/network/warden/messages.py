"""What the edge and the warden say to each other: frames of msgpack over a socket pair.

A frame is its length (4 bytes, big-endian) and one message. The edge's requests carry a number that
their answer repeats; the warden answers in order.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from msgspec import Struct, field
from typing_extensions import override

from dsec.base.errors import Unavailable
from dsec.edge.network.policy import NameRule, Span
from dsec.edge.network.warden.settings import Settings
from dsec.linux.network_filter import PortSpan
from dsec.wire.sandbox import DeniedTraffic

MAX_FRAME_BYTES = 16 << 20


class Credential(Struct, frozen=True, kw_only=True):
    """A header that the proxy sets on requests to a host. The value is a secret."""

    host: str
    """In lower case, exact."""
    header: str
    value: str
    scheme: Literal["http", "https"] = "https"
    """Of the upstream connection: https upgrades what the sandbox sends in plain."""

    @override
    def __repr__(self) -> str:
        return f"Credential(host={self.host!r}, header={self.header!r}, value=***)"

    __str__ = __repr__


class Reach(Struct, frozen=True, kw_only=True):
    """A network rule, its network in text."""

    network: str
    spans: tuple[Span, ...]
    allowed: bool = True


class HeldName(Struct, frozen=True, kw_only=True):
    """An address that a sandbox was given for names it may still reach."""

    address: bytes
    """Packed, 4 or 16 bytes."""
    spans: tuple[PortSpan, ...]
    """Of all these names together."""
    ttl_s: float


class Configure(Struct, tag="configure", kw_only=True):
    """The first message: the warden answers when it listens."""

    id: int = 0
    settings: Settings


class Assign(Struct, tag="assign", kw_only=True):
    """What the sandbox at these addresses may reach, in place of all said before."""

    id: int = 0
    sandbox: str
    address4: str
    address6: str = ""
    pins: str
    names: tuple[NameRule, ...] = ()
    networks: tuple[Reach, ...] = ()
    secrets: tuple[Credential, ...] = ()


class Refill(Struct, tag="refill", kw_only=True):
    """Put what the sandbox holds into its map again: the map was replaced."""

    id: int = 0
    address4: str


class Forget(Struct, tag="forget", kw_only=True):
    """The sandbox is over, its address may be another's next."""

    id: int = 0
    address4: str


Request = Configure | Assign | Refill | Forget


class Done(Struct, tag="done", kw_only=True):
    """A request is in force. For an `Assign`: with what stays allowed of what was given."""

    id: int
    held: tuple[HeldName, ...] = ()
    ports: dict[str, int] = field(default_factory=dict)
    """For `Configure`: the ports that are listened on."""


class Failed(Struct, tag="failed", kw_only=True):
    """A request could not be carried out."""

    id: int
    code: str
    message: str


class Denied(Struct, tag="denied", kw_only=True):
    """What a sandbox was denied since the last such message."""

    sandbox: str
    address4: str
    events: list[DeniedTraffic]


Answer = Done | Failed | Denied

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def framed(message: Request | Answer) -> bytes:
    """A message as it is sent."""
    body = _encode(message)
    return len(body).to_bytes(4, "big") + body


class Frames:
    """The receiving end of a connection."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = BufferedByteReceiveStream(stream)

    async def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The next message.

        Raises:
            anyio.EndOfStream, anyio.IncompleteRead: the other side is gone.
            Unavailable: what came is no message.
        """
        size = int.from_bytes(await self._stream.receive_exactly(4), "big")
        if size > MAX_FRAME_BYTES:
            raise Unavailable(f"a frame of {size} bytes")
        body = await self._stream.receive_exactly(size)
        try:
            return decoder.decode(body)
        except msgspec.MsgspecError:
            # What it holds may be a secret: neither the bytes nor the decoder's words go on.
            raise Unavailable("a frame that is no message") from None
