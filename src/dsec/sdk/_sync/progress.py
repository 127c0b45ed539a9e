# Generated from ../_async by tools/unasync.py; do not edit.
"""Long work that says how far it is, and at its end what it made."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from typing_extensions import override

from dsec.base.errors import InternalError
from dsec.sdk._answers import stream_error
from dsec.sdk._http import ConnectionFailed, Request
from dsec.sdk._sync.call import Body, Caller, EventStream, Lines
from dsec.wire.public_v1 import ImageProgress
from dsec.wire.sandbox import Heartbeat, StreamError

R = TypeVar("R", bound=msgspec.Struct)
Decoder = msgspec.json.Decoder


class ProgressStream(EventStream[ImageProgress | R], Generic[R]):
    """ImageProgress as it goes, then what is ready. Work that breaks off is begun again."""

    def __init__(
        self,
        caller: Caller,
        decoder: Decoder[ImageProgress | R | Heartbeat | StreamError],
        request: Request,
        body: Body | None = None,
    ) -> None:
        self._caller = caller
        self._decoder = decoder
        self._request = request
        self._body = body
        self._patience = caller.patience()
        self._lines: Lines | None = None
        self._ended = False

    @override
    def __next__(self) -> ImageProgress | R:
        """The next event.

        Raises:
            DsecError: the work failed.
        """
        while not self._ended:
            try:
                line = self._line()
            except ConnectionFailed as exc:
                self._detach()
                self._caller.lost(exc, self._request, self._patience)
                continue
            event = self._take(line)
            if event is not None:
                return event
        self._detach()
        raise StopIteration

    def _line(self) -> bytes:
        if self._lines is None:
            response = self._caller.open(self._request, self._patience, self._body)
            self._lines = Lines(response, self._patience)
        line = self._lines.next()
        if not line:
            raise ConnectionFailed("the stream ended before the work did", sent=True)
        return line

    def _take(self, line: bytes) -> ImageProgress | R | None:
        try:
            event = self._decoder.decode(line)
        except msgspec.ValidationError:
            return None
        except msgspec.DecodeError as exc:
            raise InternalError(f"a line of the stream is not JSON: {exc}") from None
        if isinstance(event, Heartbeat):
            return None
        if isinstance(event, StreamError):
            self.close()
            raise stream_error(event)
        if not isinstance(event, ImageProgress):
            self._ended = True
            self._detach()
        return event

    def _detach(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    @override
    def close(self) -> None:
        """Stop listening."""
        self._ended = True
        self._detach()
