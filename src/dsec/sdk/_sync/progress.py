# Generated from ../_async by tools/unasync.py; do not edit.
"""Long work that says how far it is, and at its end what it made."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from typing_extensions import override

from dsec.sdk._answers import stream_error
from dsec.sdk._http import Request
from dsec.sdk._sync.call import Body, Caller
from dsec.sdk._sync.lines import ResumedLines, decoded
from dsec.wire.public_v1 import ImageProgress
from dsec.wire.sandbox import Heartbeat, StreamError

R = TypeVar("R", bound=msgspec.Struct)
Decoder = msgspec.json.Decoder


class ProgressStream(ResumedLines[ImageProgress | R], Generic[R]):
    """ImageProgress as it goes, then what is ready. Work that breaks off is begun again."""

    def __init__(
        self,
        caller: Caller,
        decoder: Decoder[ImageProgress | R | Heartbeat | StreamError],
        request: Request,
        body: Body | None = None,
    ) -> None:
        super().__init__(caller, body=body)
        self._decoder = decoder
        self._work = request

    @override
    def _ask(self) -> Request:
        return self._work

    @override
    def _unfinished(self) -> str:
        return "the stream ended before the work did"

    @override
    def _take(self, line: bytes) -> ImageProgress | R | None:
        event = decoded(self._decoder, line)
        if event is None or isinstance(event, Heartbeat):
            return None
        if isinstance(event, StreamError):
            self.close()
            raise stream_error(event)
        if not isinstance(event, ImageProgress):
            self.close()
        return event
