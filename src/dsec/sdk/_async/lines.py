"""Answers of many lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from typing_extensions import override

from dsec.base.errors import InternalError
from dsec.sdk import _aio
from dsec.sdk._answers import stream_error
from dsec.sdk._async.call import Body, Caller, EventStream, Lines
from dsec.sdk._http import ConnectionFailed, Request
from dsec.sdk._patience import Patience
from dsec.wire.sandbox import StreamError

T = TypeVar("T")
V = TypeVar("V", bound=msgspec.Struct)
Decoder = msgspec.json.Decoder
_ERROR: Decoder[StreamError] = Decoder(StreamError)


class ResumedLines(EventStream[T], Generic[T]):
    """Values out of the lines of an answer; a connection that breaks is made again."""

    def __init__(
        self, caller: Caller, patience: Patience | None = None, body: Body | None = None
    ) -> None:
        self._caller = caller
        self._patience = patience or caller.patience()
        self._body = body
        self._request: Request | None = None
        self._lines: Lines | None = None
        self._ended = False

    async def _ask(self) -> Request:
        """What to send for the next connection."""
        raise NotImplementedError

    async def _take(self, line: bytes) -> T | None:
        """What a line gives; None: nothing for the caller."""
        raise NotImplementedError

    def _unfinished(self) -> str:
        """Why an answer may not end here by itself; empty: it may."""
        raise NotImplementedError

    @override
    async def __anext__(self) -> T:
        """The next value.

        Raises:
            DsecError: the stream ended with an error, or patience is over.
        """
        while not self._ended:
            request = self._request = self._request or await self._ask()
            try:
                line = await self._line(request)
            except ConnectionFailed as exc:
                await self._detach()
                await self._caller.lost(exc, request, self._patience)
                continue
            value = await self._take(line) if line else None
            if value is not None:
                return value
        await self._detach()
        raise StopAsyncIteration

    async def _line(self, request: Request) -> bytes:
        if self._lines is None:
            response = await self._caller.open(request, self._patience, self._body)
            self._lines = Lines(response, self._patience)
        line = await self._lines.next()
        if not line and (why := self._unfinished()):
            raise ConnectionFailed(why, sent=True)
        self._ended = not line
        return line

    async def _failed(self, event: StreamError) -> None:
        """Raise what the stream ended with, or wait and have it asked for again."""
        await self._detach()
        error = stream_error(event)
        if not error.retryable:
            self._ended = True
            raise error
        await _aio.sleep(self._patience.pause_s(error))

    async def _finish(self) -> None:
        """Hear the answer out: one that is broken off reads as if nobody had got it."""
        self._ended = True
        lines, self._lines = self._lines, None
        if lines is not None:
            await lines.finish()

    async def _detach(self) -> None:
        self._request = None
        lines, self._lines = self._lines, None
        if lines is not None:
            await lines.aclose()

    @override
    async def aclose(self) -> None:
        """Stop listening; what was asked for goes on."""
        self._ended = True
        await self._detach()


def decoded(decoder: Decoder[T], line: bytes) -> T | None:
    """A line as a value; None: of a kind this SDK does not know.

    Raises:
        InternalError: it is not JSON.
    """
    try:
        return decoder.decode(line)
    except msgspec.ValidationError:
        return None
    except msgspec.DecodeError as exc:
        raise InternalError(f"a line of the stream is not JSON: {exc}") from None


class LineStream(ResumedLines[V], Generic[V]):
    """Values of one shape as they come; none is given twice.

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
        super().__init__(caller, patience)
        self._make_request = request
        self._decoder = decoder
        self._key = key
        self._count = count
        self._seen: set[int | str] = set()

    @override
    async def _ask(self) -> Request:
        return self._make_request()

    @override
    def _unfinished(self) -> str:
        return "" if self._count is None else "the stream ended before all were there"

    @override
    async def _take(self, line: bytes) -> V | None:
        value = decoded(self._decoder, line)
        if value is None:
            if (error := decoded(_ERROR, line)) is not None:
                await self._failed(error)
            return None
        if self._key(value) in self._seen:
            return None
        self._seen.add(self._key(value))
        if len(self._seen) == self._count:
            await self._finish()
        return value
