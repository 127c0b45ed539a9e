"""Long work that says how far it is, and at its end what it made."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from typing_extensions import override

from dsec.base.errors import InternalError
from dsec.sdk._answers import stream_error
from dsec.sdk._async.call import Body, Caller, EventStream, Lines
from dsec.sdk._http import ConnectionFailed, Request
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
    async def __anext__(self) -> ImageProgress | R:
        """The next event.

        Raises:
            DsecError: the work failed.
        """
        while not self._ended:
            try:
                line = await self._line()
            except ConnectionFailed as exc:
                await self._detach()
                await self._caller.lost(exc, self._request, self._patience)
                continue
            event = await self._take(line)
            if event is not None:
                return event
        await self._detach()
        raise StopAsyncIteration

    async def _line(self) -> bytes:
        if self._lines is None:
            response = await self._caller.open(self._request, self._patience, self._body)
            self._lines = Lines(response, self._patience)
        line = await self._lines.next()
        if not line:
            raise ConnectionFailed("the stream ended before the work did", sent=True)
        return line

    async def _take(self, line: bytes) -> ImageProgress | R | None:
        try:
            event = self._decoder.decode(line)
        except msgspec.ValidationError:
            return None
        except msgspec.DecodeError as exc:
            raise InternalError(f"a line of the stream is not JSON: {exc}") from None
        if isinstance(event, Heartbeat):
            return None
        if isinstance(event, StreamError):
            await self.aclose()
            raise stream_error(event)
        if not isinstance(event, ImageProgress):
            self._ended = True
            await self._detach()
        return event

    async def _detach(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            await lines.aclose()

    @override
    async def aclose(self) -> None:
        """Stop listening."""
        self._ended = True
        await self._detach()
