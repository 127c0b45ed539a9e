# Generated from ../_async by tools/unasync.py; do not edit.
"""Answers of many lines, each a value of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from typing_extensions import override

from dsec.base.errors import InternalError
from dsec.sdk import _blocking
from dsec.sdk._answers import stream_error
from dsec.sdk._http import ConnectionFailed, Request
from dsec.sdk._patience import Patience
from dsec.sdk._sync.call import Caller, EventStream, Lines
from dsec.wire.sandbox import StreamError

V = TypeVar("V", bound=msgspec.Struct)
Decoder = msgspec.json.Decoder
_ERROR: Decoder[StreamError] = Decoder(StreamError)


class LineStream(EventStream[V], Generic[V]):
    """Values as they come. A connection that breaks is made again; none is given twice.

    Args:
        caller: sends the request.
        request: makes it; called again for each connection.
        decoder: of a line. What it does not know is a heartbeat, or the error the stream ends with.
        key: what tells one value from another.
        count: how many there must be; None: as many as come.
        patience: the budget; None: the caller's.
    """

    def __init__(
        self,
        caller: Caller,
        request: Callable[[], Request],
        decoder: Decoder[V],
        key: Callable[[V], int | str],
        *,
        count: int | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._caller = caller
        self._make_request = request
        self._decoder = decoder
        self._key = key
        self._count = count
        self._patience = patience or caller.patience()
        self._request: Request | None = None
        self._lines: Lines | None = None
        self._seen: set[int | str] = set()
        self._ended = False

    @override
    def __next__(self) -> V:
        """The next value.

        Raises:
            DsecError: the stream ended with an error, or patience is over.
        """
        while not self._ended and len(self._seen) != self._count:
            request = self._request = self._request or self._make_request()
            try:
                line = self._line(request)
            except ConnectionFailed as exc:
                self._detach()
                self._caller.lost(exc, request, self._patience)
                continue
            value = self._take(line)
            if value is not None and self._key(value) not in self._seen:
                self._seen.add(self._key(value))
                if len(self._seen) == self._count:
                    self._finish()
                return value
        self._detach()
        raise StopIteration

    def _line(self, request: Request) -> bytes:
        if self._lines is None:
            response = self._caller.open(request, self._patience)
            self._lines = Lines(response, self._patience)
        line = self._lines.next()
        if not line and self._count is not None:
            raise ConnectionFailed("the stream ended before all were there", sent=True)
        self._ended = not line
        return line

    def _take(self, line: bytes) -> V | None:
        if not line:
            return None
        try:
            return self._decoder.decode(line)
        except msgspec.ValidationError:
            self._said(line)
            return None
        except msgspec.DecodeError as exc:
            raise InternalError(f"a line of the stream is not JSON: {exc}") from None

    def _said(self, line: bytes) -> None:
        try:
            event = _ERROR.decode(line)
        except msgspec.ValidationError:
            return  # a heartbeat
        self._detach()
        error = stream_error(event)
        if not error.retryable:
            self._ended = True
            raise error
        _blocking.sleep(self._patience.pause_s(error))

    def _finish(self) -> None:
        """Hear the answer out: one that is broken off reads as if nobody had got it."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.finish()

    def _detach(self) -> None:
        self._request = None
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    @override
    def close(self) -> None:
        """Stop listening; what was asked for goes on."""
        self._ended = True
        self._detach()
