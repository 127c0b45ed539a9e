"""A trajectory as bytes: a magic, then frames of length, checksum and one MessagePack entry.

    magic  "DSECTRJ1"
    frame  u32 length, u32 CRC-32 of the payload (little-endian), payload
    payload  ["b", seq, ...] an operation's beginning; ["e", seq, ...] its end;
             ["i", until] what follows up to `until` happened in the parent

A file that was being written to when its writer was killed ends in a piece of a frame. Whatever is
not a whole frame with its checksum is the end of the file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct, field

from dsec.wire.sandbox import Captured

MAGIC = b"DSECTRJ1"
HEADER = struct.Struct("<II")
MAX_PAYLOAD_BYTES = 4 << 20
"""A longer one is not written, and where one is announced the file is damaged."""
READ_BYTES = 1 << 20


class Begun(Struct, tag="b", array_like=True, frozen=True):
    """An operation has reached the sandbox."""

    seq: int
    at: float
    op: str
    id: str = ""
    """The caller's: a command's id, or an idempotency key."""
    caller: str = ""
    digest: bytes = b""
    """Of the request, to tell a repeat from another request under the same id."""
    args: dict[str, Any] = field(default_factory=dict)


class Ended(Struct, tag="e", array_like=True, frozen=True):
    """An operation is over."""

    seq: int
    at: float
    outcome: str
    result: dict[str, Any] = field(default_factory=dict)
    stdout: Captured | None = None
    stderr: Captured | None = None
    digest: bytes = b""
    """sha256 of a streamed body, known only when it has passed."""
    size_bytes: int = 0
    """Of that body."""
    body: bytes = b""
    """That body, if it is small."""


class Inherited(Struct, tag="i", array_like=True, frozen=True):
    """Entries up to `until` are another sandbox's."""

    until: int


Entry = Begun | Ended | Inherited


class Head(Struct, array_like=True, frozen=True):
    """What all entries begin with; read without the rest of them."""

    kind: str
    seq: int


class _Outcome(Head, array_like=True, frozen=True):
    at: float
    outcome: str


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_entry = msgspec.msgpack.Decoder(Entry)
_head = msgspec.msgpack.Decoder(Head)
_outcome = msgspec.msgpack.Decoder(_Outcome)


def frame(entry: Entry) -> bytes:
    """An entry as it is written.

    Raises:
        ValueError: it is over `MAX_PAYLOAD_BYTES`.
    """
    payload = _encode(entry)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"an entry of {len(payload)} bytes")
    return framed(payload)


def decode(payload: bytes | memoryview) -> Entry | None:
    """An entry from a frame's payload; None for one that makes no sense to this version."""
    try:
        return _entry.decode(payload)
    except msgspec.MsgspecError:
        return None


def head(payload: bytes | memoryview) -> Head | None:
    """What kind of entry it is, and its number."""
    try:
        return _head.decode(payload)
    except msgspec.MsgspecError:
        return None


def outcome(payload: bytes | memoryview) -> str:
    """The outcome an end tells of, without the rest of it."""
    try:
        return _outcome.decode(payload).outcome
    except msgspec.MsgspecError:
        return ""


def framed(payload: bytes | memoryview) -> bytes:
    """A payload as a frame."""
    return HEADER.pack(len(payload), zlib.crc32(payload)) + payload


class Frames:
    """The whole frames of an open file, in order; `end` is where they end."""

    def __init__(self, file: BinaryIO, begin: int = 0) -> None:
        """Read them from the start, or from where one is known to begin."""
        self._file = file
        self.end = begin

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        """Where each frame begins, and its payload, which is good until the next one."""
        if self.end < len(MAGIC):
            self._file.seek(0)
            if self._file.read(len(MAGIC)) != MAGIC:
                return
            self.end = len(MAGIC)
        self._file.seek(self.end)
        left = b""
        while chunk := self._file.read(READ_BYTES):
            left += chunk
            at = 0
            for begin, payload in _whole(left):
                yield self.end + begin, payload
                at = begin + HEADER.size + len(payload)
            self.end += at
            left = left[at:]
            if _hopeless(left):
                return


def _whole(data: bytes) -> Iterator[tuple[int, memoryview]]:
    view, at = memoryview(data), 0
    while len(data) - at >= HEADER.size:
        size, check = HEADER.unpack_from(data, at)
        payload = view[at + HEADER.size : at + HEADER.size + size]
        if not 0 < size <= MAX_PAYLOAD_BYTES or len(payload) < size or zlib.crc32(payload) != check:
            return
        yield at, payload
        at += HEADER.size + size


def _hopeless(data: bytes) -> bool:
    """Whether no further bytes can make a frame of it."""
    if len(data) < HEADER.size:
        return False
    size, _ = HEADER.unpack_from(data)
    return not 0 < size <= MAX_PAYLOAD_BYTES or len(data) >= HEADER.size + size


def entry_at(file: BinaryIO, offset: int) -> Entry | None:
    """The entry whose frame begins there; None if there is no whole one."""
    file.seek(offset)
    start = file.read(HEADER.size)
    if len(start) < HEADER.size:
        return None
    size, check = HEADER.unpack(start)
    payload = file.read(size) if size <= MAX_PAYLOAD_BYTES else b""
    if len(payload) < size or zlib.crc32(payload) != check:
        return None
    return decode(payload)
