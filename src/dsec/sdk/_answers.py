"""Reading answers: JSON, error bodies, lines of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from dsec.base.errors import DsecError, InternalError, InvalidRequest, Unavailable, error_from
from dsec.wire.public_v1 import ErrorAnswer, ErrorBody
from dsec.wire.sandbox import StreamError

T = TypeVar("T")
MAX_LINE_BYTES = 64 << 20
_ERROR = msgspec.json.Decoder(ErrorAnswer)


def error_of(body: ErrorBody, http_status: int = 500) -> DsecError:
    """An error body as the exception it stands for."""
    return error_from(body.code, body.message, _extra(body), http_status)


def _extra(body: ErrorBody) -> dict[str, str | int | float | bool | None]:
    details = {key: value for key, value in body.details.items() if key.isidentifier()}
    details.pop("message", None)
    details.pop("self", None)
    if body.request_id:
        details.setdefault("request_id", body.request_id)
    return details


def stream_error(event: StreamError) -> DsecError:
    """The last event of a stream that failed."""
    return error_of(
        ErrorBody(code=event.code, message=event.message, details=event.details), event.http_status
    )


def http_error(status: int, body: bytes) -> DsecError:
    """An answer that is not 2xx; a proxy's page instead of an error body counts by its status."""
    try:
        return error_of(_ERROR.decode(body).error, status)
    except (msgspec.DecodeError, msgspec.ValidationError):
        text = " ".join(body[:200].decode("utf-8", "replace").split())
        if status in {502, 503, 504}:
            return Unavailable(f"HTTP {status} from something in between: {text}")
        return error_from("", f"HTTP {status}: {text}", {}, status)


def encode(body: object) -> bytes:
    """A request's body as JSON.

    Raises:
        InvalidRequest: something in it is no text, as names of files may be.
    """
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"{exc.object!r} cannot be sent: it is not UTF-8") from exc


def decode(body: bytes, shape: type[T]) -> T:
    """A 2xx answer; a long call may fail after its status was sent, with an error body under 200.

    Raises:
        DsecError: the error in the body.
        InternalError: it is not what the API promises.
    """
    if body.lstrip(b"\n\r\t ")[:9].replace(b" ", b"") == b'{"error":':
        try:
            late = _ERROR.decode(body).error
        except (msgspec.DecodeError, msgspec.ValidationError):
            pass
        else:
            raise error_of(late, 500)
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise InternalError(
            f"the server's answer is not a {getattr(shape, '__name__', shape)}: {exc}; "
            "is it a DSec of another version?"
        ) from None


def retry_after_s(error: DsecError, headers: Mapping[str, str]) -> float | None:
    """When the server says to come back."""
    try:
        return float(headers["retry-after"])
    except (KeyError, ValueError):
        value = error.details.get("retry_after_s")
        return float(value) if isinstance(value, (int, float)) else None


class LineSplitter:
    """Chunks of bytes in, whole lines out."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take a chunk; the lines it completes, blank ones left out."""
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._parts, whole[0]])
            self._parts = []
            self._size = 0
        self._parts.append(rest)
        self._size += len(rest)
        if self._size > MAX_LINE_BYTES:
            raise InternalError("a line of the stream is over the limit", limit=MAX_LINE_BYTES)
        return [line for line in whole if line.strip()]
