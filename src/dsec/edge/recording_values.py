"""What is written of arguments, results and outputs: whole if it is small."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from dsec.base.errors import InvalidRequest
from dsec.wire.sandbox import Captured

OUTPUT_BYTES = 64 << 10
"""Of each stream of a command: half from the head and half from the tail."""
SMALL_BYTES = 16 << 10
"""Arguments, or a result, that are written as they are."""
LONG_TEXT = 1024
MANY = 256
SHOWN = 128

_plain = msgspec.msgpack.Encoder()
_canonical = msgspec.msgpack.Encoder(order="sorted")


def _encode(value: object, encoder: msgspec.msgpack.Encoder = _plain) -> bytes:
    try:
        return encoder.encode(value)
    except OverflowError:  # JSON knows no limit
        raise InvalidRequest("a whole number in the request is beyond 64 bits") from None


def digest_of(*parts: object) -> bytes:
    """Of a request: the same for the same request.

    Raises:
        InvalidRequest: it cannot be written down.
    """
    return hashlib.sha256(_encode(parts, _canonical)).digest()[:16]


def bounded(value: dict[str, Any]) -> dict[str, Any]:
    """Arguments or a result; what is long is given by its size and sha256.

    Raises:
        InvalidRequest: it cannot be written down.
    """
    if len(_encode(value)) <= SMALL_BYTES:
        return value
    shorter: dict[str, Any] = _shortened(value)
    encoded = _encode(shorter)
    return shorter if len(encoded) <= 4 * SMALL_BYTES else _summary(_encode(value))


def _shortened(value: Any) -> Any:
    match value:
        case str() if len(value) > LONG_TEXT:
            raw = value.encode("utf-8", "surrogateescape")
            return {"begins": value[:SHOWN], **_summary(raw)}
        case bytes() if len(value) > LONG_TEXT:
            return _summary(value)
        case dict():
            return {key: _shortened(item) for key, item in value.items()}
        case list() if len(value) > MANY:
            return {"items": len(value), **_summary(_encode(value))}
        case list():
            return [_shortened(item) for item in value]
        case _:
            return value


def _summary(raw: bytes) -> dict[str, Any]:
    return {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def clipped(captured: Captured) -> Captured:
    """A stream's output as it is written."""
    size = len(captured.head) + len(captured.tail)
    if size <= OUTPUT_BYTES:
        return captured
    half = OUTPUT_BYTES // 2
    head, tail = captured.head, captured.tail
    if not captured.dropped_bytes:
        head = tail = captured.join()
    head, tail = head[:half], tail[-half:]
    dropped = captured.dropped_bytes + size - len(head) - len(tail)
    return Captured(head=head, tail=tail, dropped_bytes=dropped)
