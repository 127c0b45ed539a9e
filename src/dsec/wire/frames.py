"""The channel between edge and aether: frames on one byte stream. Words and vectors: spec/.

Pure encode and decode, no sockets; the same bytes are produced by native/aether/src/frame.rs.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

VERSION = 1
HEADER = struct.Struct(">IIBBH")
"""Payload length, stream id, version, kind, channel; big endian, 12 bytes."""
MAX_PAYLOAD = 1 << 20
INITIAL_CREDIT = 256 * 1024
"""Bytes of DATA a side may send on a fresh stream, per direction, before any CREDIT."""


class Kind(enum.IntEnum):
    """What a frame is."""

    OPEN = 1  # edge -> aether: MessagePack map, "m" is the method
    DATA = 2  # both: raw bytes; channel says which
    END = 3  # both: the sender will send no more DATA on this channel
    EVENT = 4  # aether -> edge: MessagePack map
    RESULT = 5  # aether -> edge: MessagePack; the stream is over
    ERROR = 6  # aether -> edge: MessagePack map; the stream is over
    CREDIT = 7  # both: u32, so many more bytes of DATA may come
    CANCEL = 8  # edge -> aether: stop; answered by RESULT or ERROR like any stream
    PING = 9  # both, stream 0
    PONG = 10


class Channel(enum.IntEnum):
    """Which flow a DATA or END frame belongs to."""

    MAIN = 0
    STDOUT = 1
    STDERR = 2


class Frame(NamedTuple):
    """One frame."""

    kind: Kind
    stream: int
    payload: bytes = b""
    channel: int = Channel.MAIN


class FrameError(ValueError):
    """The bytes are not frames; the channel cannot be trusted any more."""


def encode(frame: Frame) -> bytes:
    """One frame as bytes.

    Raises:
        FrameError: the payload is larger than MAX_PAYLOAD.
    """
    if len(frame.payload) > MAX_PAYLOAD:
        raise FrameError(f"payload of {len(frame.payload)} bytes is over {MAX_PAYLOAD}")
    return (
        HEADER.pack(len(frame.payload), frame.stream, VERSION, frame.kind, frame.channel)
        + frame.payload
    )


class Decoder:
    """Bytes in any pieces in, frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes, yield the frames they complete.

        Raises:
            FrameError: a header is not of this protocol.
        """
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEADER.size:
                size, stream, version, kind, channel = HEADER.unpack_from(self._buffer, at)
                if version != VERSION or size > MAX_PAYLOAD or kind not in _KINDS:
                    raise FrameError(f"bad header: version {version}, kind {kind}, size {size}")
                end = at + HEADER.size + size
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[at + HEADER.size : end])
                at = end
                yield Frame(Kind(kind), stream, payload, channel)
        finally:
            del self._buffer[:at]


_KINDS = frozenset(Kind)
