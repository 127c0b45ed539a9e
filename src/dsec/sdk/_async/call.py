"""Calls: a request sent until it is answered, or until patience is over."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Protocol, Self, TypeVar

from dsec.base.errors import (
    CapacityUnavailable,
    DsecError,
    RateLimited,
    Unavailable,
)
from dsec.sdk import _aio
from dsec.sdk._answers import LineSplitter, decode, encode, http_error, retry_after_s
from dsec.sdk._async.transport import PortStream, Response, Transport
from dsec.sdk._http import ConnectionFailed, QueryValue, Request
from dsec.sdk._ids import Ids
from dsec.sdk._patience import HEARD_WITHIN_S, Patience
from dsec.sdk._version import VERSION

T = TypeVar("T")
Query = Mapping[str, QueryValue | list[str]]
Body = Callable[[], AsyncIterator[bytes]]
FINISH_S = 1.0
HEAD_WITHIN_S = 90.0
"""Of a call the edge answers at once, or within a minute."""
UPLOAD_S = 3600.0
"""Of one that takes as long as its body is taken: input nobody reads yet, a tree of many files."""
USER_AGENT = f"dsec-sdk/{VERSION}"


class Over(Protocol):
    """Called with a request that was answered."""

    async def __call__(self, request: Request, /) -> None:
        """Do what is to be done then."""
        ...


class Caller:
    """Sends requests with the key, again where that is safe, and reads answers."""

    def __init__(
        self, transport: Transport, api_key: str, where: str, unreachable_s: float
    ) -> None:
        self._transport = transport
        self._where = where
        self._unreachable_s = unreachable_s
        self._reached = False
        self.ids = Ids()
        self.over: Over | None = None
        """Told of each request that was answered whole."""
        self.recorded: bool | None = None
        """Whether the last answer came from the sandbox's record; None: the platform did not say."""
        self._headers = {"User-Agent": USER_AGENT, "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def numbering(self, ids: Ids) -> Self:
        """A caller over the same connections whose operations have other ids."""
        other = copy.copy(self)
        other.ids, other.recorded, other.over = ids, None, None
        return other

    def new_key(self) -> str:
        """The id of the next operation; its every attempt carries the same."""
        self.recorded = None
        return self.ids.key()

    def patience(
        self, timeout: float | None = None, unreachable_s: float | None = None
    ) -> Patience:
        """A budget for one call."""
        limit = self._unreachable_s if unreachable_s is None else unreachable_s
        return Patience(_aio.monotonic, limit, timeout)

    def request(  # noqa: PLR0913 - keywords
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: object = None,
        *,
        key: str | None = None,
        repeatable: bool = True,
        patience_s: float = HEAD_WITHIN_S,
    ) -> Request:
        """A request with a JSON body, or bytes."""
        headers = dict(self._headers)
        raw = b""
        if body is not None:
            raw = body if isinstance(body, bytes) else encode(body)
            kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
            headers["Content-Type"] = kind
        if key is not None:
            headers["Idempotency-Key"] = key
        return Request(
            method,
            path,
            query or {},
            headers,
            raw,
            repeatable=repeatable,
            patience_s=patience_s,
        )

    def upload(
        self,
        method: str,
        path: str,
        query: Query,
        *,
        repeatable: bool,
        kind: str,
        key: str | None = None,
    ) -> Request:
        """A request whose body is streamed."""
        headers = {**self._headers, "Content-Type": kind}
        if key is not None:
            headers["Idempotency-Key"] = key
        return Request(
            method,
            path,
            query,
            headers,
            streamed=True,
            repeatable=repeatable,
            patience_s=UPLOAD_S,
        )

    async def call(self, request: Request, shape: type[T], patience: Patience | None = None) -> T:
        """Send a request and read its JSON answer."""
        patience = patience or self.patience()
        while True:
            response = await self.open(request, patience)
            try:
                body = await read_all(response, patience)
            except ConnectionFailed as exc:
                await self._lost(exc, request, patience)
                continue
            return await self._answered(request, decode(body, shape))

    async def _answered(self, request: Request, answer: T) -> T:
        if self.over is not None:
            await self.over(request)
        return answer

    async def do(self, request: Request, patience: Patience | None = None) -> None:
        """Send a request whose answer says nothing."""
        patience = patience or self.patience()
        response = await self.open(request, patience)
        try:
            await read_all(response, patience)
        except ConnectionFailed:
            await response.aclose()

    async def send_body(
        self, request: Request, body: Body, shape: type[T], patience: Patience | None = None
    ) -> T:
        """Send a streamed body, from its start each time, and read the JSON answer."""
        patience = patience or self.patience()
        while True:
            response = await self.open(request, patience, body)
            try:
                answer = await read_all(response, patience)
            except ConnectionFailed as exc:
                await self._lost(exc, request, patience)
                continue
            return await self._answered(request, decode(answer, shape))

    async def open(
        self, request: Request, patience: Patience, body: Body | None = None
    ) -> Response:
        """Send a request until it is answered with 2xx; the body is the caller's to read.

        Raises:
            DsecError: the answer is an error that another attempt would not change, or patience
                is over.
        """
        while True:
            try:
                response = await self._transport.send(
                    request, body() if body else None, patience.wait_s(request.patience_s)
                )
                self._reached = True
                if response.status < 300:
                    self._note(response)
                    patience.succeeded()
                    return response
                answer = await read_all(response, patience)
            except ConnectionFailed as exc:
                await self._lost(exc, request, patience)
                continue
            error = http_error(response.status, answer)
            if not _may_pass(error, request):
                raise error
            await _aio.sleep(patience.pause_s(error, retry_after_s(error, response.headers)))

    def _note(self, response: Response) -> None:
        said = response.headers.get("x-recorded")
        if said is not None:
            self.recorded = said.lower() == "true"

    async def _lost(self, exc: ConnectionFailed, request: Request, patience: Patience) -> None:
        patience.wait_s()  # a deadline that has passed is what is reported
        error = self._unavailable(exc)
        if exc.sent and not request.repeatable:
            error.details["sent"] = True
            raise error from exc
        await _aio.sleep(patience.pause_s(error))

    def _unavailable(self, exc: ConnectionFailed) -> Unavailable:
        if self._reached or exc.sent:
            return Unavailable(f"lost the connection to {self._where}: {exc}")
        return Unavailable(
            f"nothing answers at {self._where} ({exc}); start one with `dsec up`, "
            "or set DSEC_API_URL"
        )

    async def lost(self, exc: ConnectionFailed, request: Request, patience: Patience) -> None:
        """A stream broke off: pause before it is attached again.

        Raises:
            DsecError: patience is over.
        """
        await self._lost(exc, request, patience)

    async def websocket(self, request: Request) -> PortStream:
        """Open a WebSocket; only the opening is repeated."""
        patience = self.patience()
        while True:
            try:
                return await self._transport.websocket(request, patience.wait_s())
            except ConnectionFailed as exc:
                await self._lost(exc, request, patience)
            except DsecError as error:
                if not error.retryable:
                    raise
                await _aio.sleep(patience.pause_s(error))

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transport.aclose()


def _may_pass(error: DsecError, request: Request) -> bool:
    # These two say that nothing was done; the others leave it open.
    nothing_done = isinstance(error, (RateLimited, CapacityUnavailable))
    return error.retryable and (request.repeatable or nothing_done)


async def read_all(response: Response, patience: Patience) -> bytes:
    """The whole body.

    Raises:
        ConnectionFailed: it broke off.
    """
    parts: list[bytes] = []
    try:
        while data := await response.receive(patience.wait_s(HEARD_WITHIN_S)):
            parts.append(data)
    finally:
        await response.aclose()
    return b"".join(parts)


class Lines:
    """The lines of a response, as they come."""

    def __init__(self, response: Response, patience: Patience) -> None:
        self._response = response
        self._patience = patience
        self._splitter = LineSplitter()
        self._ready: list[bytes] = []

    async def next(self) -> bytes:
        """The next line, b"" at the end.

        Raises:
            ConnectionFailed: the response broke off.
        """
        while not self._ready:
            data = await self._response.receive(self._patience.wait_s())
            if not data:
                return b""
            self._patience.succeeded()
            self._ready = self._splitter.feed(data)
            self._ready.reverse()
        return self._ready.pop()

    async def finish(self) -> None:
        """Read past the last line, so that the connection can be used again."""
        try:
            while await self._response.receive(FINISH_S):
                pass
        except ConnectionFailed:
            pass
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Be done with the response."""
        await self._response.aclose()


class EventStream(AsyncIterator[T]):
    """Something to iterate over; leave it early with `aclose()` or by `async with`."""

    async def aclose(self) -> None:
        """Let go of the connection."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
