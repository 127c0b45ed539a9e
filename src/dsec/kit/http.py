"""HTTP glue: a table of routes becomes an ASGI application (and by `kit.openapi` a description).

A handler gets a `Request`, returns a response, and raises errors of `dsec.base.errors`; what those
look like on the wire is decided here and nowhere else.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import anyio
import anyio.abc
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Router, compile_path
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from dsec.base.clock import Clock
from dsec.base.errors import (
    DsecError,
    InternalError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    RequestError,
    StorageFull,
)
from dsec.base.ids import idempotency_key
from dsec.kit import log
from dsec.wire.public_v1 import ErrorAnswer, ErrorBody
from dsec.wire.sandbox import StreamError

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[ASGIApp]]
logger = logging.getLogger("dsec.http")

MAX_BODY_BYTES = 16 << 20
"""Of a JSON body; raw uploads are streamed and have no limit here."""
KEEPALIVE_S = 10.0
PATHS = frozenset({"path", "to"})
"""Parameters that name files: any bytes Linux allows. All others are text."""
_SURROGATES = re.compile("[\ud800-\udfff]")
HEARTBEAT = b'{"type":"heartbeat"}\n'
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Route:
    """One line of an API: what it takes, what it answers, who serves it."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type | None = None
    query: type | None = None
    answer: object = None
    """A shape; a tuple of shapes if it may be any of them."""
    status: int = 200
    media_type: str = "application/json"
    public: bool = False
    """Needs no key."""


def error_body(error: DsecError) -> ErrorAnswer:
    """An error as it goes over the wire."""
    return ErrorAnswer(
        error=ErrorBody(
            code=error.code,
            message=_printable(error.message),
            retryable=error.retryable,
            request_id=log.request_id.get(),
            details={
                key: _printable(value) if isinstance(value, str) else value
                for key, value in error.details.items()
            },
        )
    )


def _printable(text: str) -> str:
    """Text as UTF-8 can carry it: a file's name may hold bytes that are not (surrogates)."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def error_response(error: DsecError, status: int = 0) -> Response:
    """An error as a response; a refusal that may pass says when to come back.

    Args:
        error: what to say.
        status: if HTTP has a finer word for it than the error's own.
    """
    headers = {"Retry-After": "1"} if error.retryable else None
    return json_response(error_body(error), status or error.http_status, headers)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A value as a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def as_error(exc: Exception) -> DsecError:
    """Any exception as an entry of the error table; an unforeseen one is logged as our bug."""
    match exc:
        case DsecError():
            return exc
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return StorageFull("the disk is full")
        case HTTPException(status_code=404):
            return NotFound("no such route", kind="route")
        case HTTPException(status_code=status) if status < 500:
            return RequestError(str(exc.detail))
        case _:
            incident = secrets.token_hex(6)
            logger.error("unforeseen failure", extra={"incident": incident}, exc_info=exc)
            return InternalError(f"internal error; incident {incident}", incident=incident)


async def read_body(request: Request, shape: type[T], limit: int = MAX_BODY_BYTES) -> T:
    """Read and check a JSON body.

    Raises:
        InvalidRequest: it is not JSON of that shape; the message names the place.
        PayloadTooLarge: it is over the limit.
    """
    parts: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise PayloadTooLarge(f"the body is over {limit} bytes", limit=limit)
        parts.append(chunk)
    try:
        return msgspec.json.decode(b"".join(parts) or b"{}", type=shape)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.MsgspecError as exc:
        raise _not_valid(exc) from None


def read_query(request: Request, shape: type[T]) -> T:
    """Read and check the query string.

    In the paths of files (`PATHS`) bytes that are not UTF-8 arrive as surrogates.

    Raises:
        InvalidRequest: a value is wrong, missing, unknown, or not UTF-8 where it must be.
    """
    raw = request.scope["query_string"].decode("ascii", "surrogateescape")
    values: dict[str, object] = {}
    for key, value in parse_qsl(raw, keep_blank_values=True, errors="surrogateescape"):
        if key not in PATHS and not _utf8(value):
            raise InvalidRequest(f"{key} is not UTF-8", place=key)
        if key in values:
            earlier = values[key]
            values[key] = [*earlier, value] if isinstance(earlier, list) else [earlier, value]
        else:
            values[key] = value
    try:
        return msgspec.convert(values, shape, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:  # the latter of a key's name
        raise _not_valid(exc) from None


def key_of(request: Request) -> str:
    """The idempotency key of a request; "" if it has none.

    Raises:
        InvalidRequest: it is empty, or too long.
    """
    key = request.headers.get("idempotency-key")
    return "" if key is None else idempotency_key(key)


def _utf8(text: str) -> bool:
    return text.isascii() or not _SURROGATES.search(text)


def _not_valid(exc: Exception) -> InvalidRequest:
    """What msgspec found wrong, the place first, and in words that are not Python's."""
    what, _, place = str(exc).partition(" - at `$")
    for type_name, words in _TYPES.items():
        what = what.replace(f"`{type_name}`", words)
    place = place.removesuffix("`").removeprefix(".")
    what = what[:1].lower() + what[1:]
    if not place:
        return InvalidRequest(f"the request is not valid: {what}")
    return InvalidRequest(f"the request is not valid: {place}: {what}", place=place)


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "nothing",
}


def path_bytes(text: str) -> bytes:
    """A path from a query string as the bytes the caller meant.

    Raises:
        InvalidRequest: empty, or with a NUL byte.
    """
    raw = os.fsencode(text)
    if not raw or b"\0" in raw:
        raise InvalidRequest("a path must not be empty and must not contain a NUL byte")
    return raw


class LateJson:
    """A JSON answer that may take long: newlines keep the connection alive until it is ready.

    A failure within the first interval has its own status; a later one is an error body under the
    status already sent (spec/rest.md). A client that goes away cancels the work. The request's body
    must have been read before.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[object]],
        status: int = 200,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self._work = work
        self._status = status
        self._keepalive_s = keepalive_s
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it (ASGI)."""
        response: Response | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep_alive, group, receive, send)
            try:
                response = json_response(await self._work(), self._status)
            except Exception as exc:  # noqa: BLE001 - the HTTP boundary
                response = error_response(as_error(exc))
            group.cancel_scope.cancel()
        if response is None:
            return  # the client went away
        with anyio.CancelScope(shield=True):
            if self._begun:
                await send({"type": "http.response.body", "body": bytes(response.body)})
            else:
                await response(scope, receive, send)

    async def _keep_alive(self, group: anyio.abc.TaskGroup, receive: Receive, send: Send) -> None:
        while True:
            with anyio.move_on_after(self._keepalive_s):
                await _disconnected(receive)
                group.cancel_scope.cancel()
                return
            with anyio.CancelScope(shield=True):
                if not self._begun:
                    self._begun = True
                    await send(_start(self._status, "application/json"))
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})


class Ndjson:
    """A stream of events, one JSON object a line, with heartbeats while nothing happens.

    The status waits for the first event, or for the first heartbeat, so that a failure before it
    has its own; a later failure is the stream's last line. A client that goes away cancels the
    events. The request's body must have been read before, or be read by the events themselves, who
    then say so by `reads_body`: a departed client shows when they read. Events that need tasks of
    their own come as a context manager: a generator must not hold a task group over a yield.
    """

    def __init__(
        self,
        events: AsyncGenerator[object, None] | AbstractAsyncContextManager[AsyncIterator[object]],
        keepalive_s: float = KEEPALIVE_S,
        *,
        reads_body: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._source = aclosing(events) if isinstance(events, AsyncGenerator) else events
        self._keepalive_s = keepalive_s
        self._reads_body = reads_body
        self._headers = headers or {}
        self._lock = anyio.Lock()
        self._quiet = True
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it (ASGI)."""
        async with anyio.create_task_group() as group:
            if not self._reads_body:
                group.start_soon(_cancel_on_disconnect, group, receive)
            group.start_soon(self._heartbeats, send)
            await self._serve(scope, receive, send)
            group.cancel_scope.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._source as events:
                async for event in events:
                    self._quiet = False
                    await self._emit(send, _line(event))
        except ClientDisconnect:
            return
        except Exception as exc:  # noqa: BLE001 - the HTTP boundary
            error = as_error(exc)
            async with self._lock:
                if not self._begun:
                    self._begun = True
                    await error_response(error)(scope, receive, send)
                    return
            await self._emit(send, _line(_last_event(error)))
        await self._emit(send, b"", more=False)

    async def _emit(self, send: Send, line: bytes, *, more: bool = True) -> None:
        async with self._lock:
            if not self._begun:
                self._begun = True
                await send(_start(200, "application/x-ndjson", self._headers))
            await send({"type": "http.response.body", "body": line, "more_body": more})

    async def _heartbeats(self, send: Send) -> None:
        while True:
            await anyio.sleep(self._keepalive_s)
            if self._quiet:
                await self._emit(send, HEARTBEAT)
            self._quiet = True


def _last_event(error: DsecError) -> StreamError:
    body = error_body(error).error
    return StreamError(
        code=body.code, message=body.message, details=body.details, http_status=error.http_status
    )


def _start(
    status: int, media_type: str, headers: Mapping[str, str] | None = None
) -> dict[str, object]:
    extra = [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", media_type.encode()), *extra],
    }


def _line(event: object) -> bytes:
    return msgspec.json.encode(event) + b"\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel_on_disconnect(group: anyio.abc.TaskGroup, receive: Receive) -> None:
    await _disconnected(receive)
    group.cancel_scope.cancel()


class RequestContext:
    """Gives each request an id, logs its end, and turns errors into answers (ASGI middleware).

    Inside another one (an edge served in the apiserver's process) it steps aside: a request has one
    id and one line in the log.
    """

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in {"http", "websocket"} or _NESTED in scope:
            await self._app(scope, receive, send)
            return
        scope[_NESTED] = True
        request_id = _request_id(scope)
        token = log.request_id.set(request_id)
        begun = self._clock.monotonic()
        watched = _Watched(send, request_id)
        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            watched.status = watched.status or 499
        except Exception as exc:
            if watched.status:
                _log_broken(exc)
                raise  # the server aborts the connection: never a clean end of a broken body
            await _refuse(as_error(exc), scope, receive, watched)
        finally:
            if logger.isEnabledFor(logging.INFO):
                logger.info(
                    "request completed",
                    extra={
                        "method": scope.get("method", "WEBSOCKET"),
                        "path": scope["path"],
                        "status": watched.status,
                        "ms": round((self._clock.monotonic() - begun) * 1000, 2),
                    },
                )
            log.request_id.reset(token)


def _log_broken(exc: Exception) -> None:
    """Say why an answer breaks off, if that was foreseen: what is a bug the server logs."""
    if isinstance(exc, DsecError):
        about = {"code": exc.code, "error": exc.message}
        logger.warning("an answer broke off", extra=about)


_NESTED = "dsec.request_context"


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(given):
                return given
    return secrets.token_hex(8)


class _Watched:
    """Notes the status that goes by and adds the request's id to it."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """Send one message (ASGI)."""
        match message["type"]:
            case "http.response.start" | "websocket.http.response.start":
                self.status = message["status"]
                # An answer passed through from another process names the same request already.
                rest = [h for h in message.get("headers", []) if h[0] != b"x-request-id"]
                message["headers"] = [*rest, self._header]
            case "websocket.accept":
                self.status = 101
            case _:
                pass
        await self._send(message)


async def _refuse(error: DsecError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error; a WebSocket that was not accepted yet gets an ordinary response."""
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        await error_response(error)(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})


def make_app(
    routes: Sequence[Route],
    clock: Clock,
    *,
    extra: Sequence[BaseRoute] = (),
    lifespan: Lifespan[Any] | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] | None = None,
) -> ASGIApp:
    """An application from a table of routes.

    Args:
        routes: the table; the first match serves.
        clock: measures requests.
        extra: routes that are no plain request and response (WebSockets, mounts).
        lifespan: what runs around serving, where the server says when.
        wrap: inner middleware, e.g. authentication; errors it raises are answered like a handler's.
    """
    app: ASGIApp = _Table(routes, extra, lifespan)
    return RequestContext(wrap(app) if wrap else app, clock)


class _Table:
    """Finds the handler for a request (ASGI).

    Starlette's own application would answer some errors itself, redirect slashes, and try routes
    one by one for each method.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        extra: Sequence[BaseRoute],
        lifespan: Lifespan[Any] | None,
    ) -> None:
        self._fixed: dict[str, dict[str, Handler]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Handler]]] = {}
        for route in routes:
            if "{" in route.path:
                pattern, _, _ = compile_path(route.path)
                _, methods = self._patterns.setdefault(route.path, (pattern, {}))
            else:
                methods = self._fixed.setdefault(route.path, {})
            methods.setdefault(route.method, route.handler)
        self._rest = Router(
            list(extra), redirect_slashes=False, default=_no_such_route, lifespan=lifespan
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        found = self._find(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._rest(scope, receive, send)
            return
        methods, scope["path_params"] = found
        handler = methods.get(scope["method"])
        if handler is None:
            allowed = ", ".join(sorted(methods))
            error = RequestError(f"{scope['method']} is not among {allowed}", allow=allowed)
            await error_response(error, 405)(scope, receive, send)
            return
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)

    def _find(self, path: str) -> tuple[dict[str, Handler], dict[str, str]] | None:
        if methods := self._fixed.get(path):
            return methods, {}
        for pattern, methods in self._patterns.values():
            if match := pattern.fullmatch(path):  # `$` would let a last newline pass
                return methods, match.groupdict()
        return None


async def _no_such_route(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await _refuse(NotFound("no such route", kind="route"), scope, receive, send)
    else:
        raise NotFound("no such route", kind="route")
