"""HTTP glue: a table of routes becomes an ASGI application and its OpenAPI description.

A handler gets a `Request`, returns a response, and raises errors of `dsec.base.errors`; what those
look like on the wire is decided here and nowhere else.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qsl

import anyio
import anyio.abc
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from dsec.base.clock import Clock
from dsec.base.errors import (
    DsecError,
    InternalError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    RequestError,
)
from dsec.kit import log
from dsec.wire.public_v1 import ErrorAnswer, ErrorBody
from dsec.wire.sandbox import StreamError

T = TypeVar("T")
Handler = Callable[[Request], Awaitable["Response | LateJson | Ndjson"]]
logger = logging.getLogger("dsec.http")

MAX_BODY_BYTES = 16 << 20
"""Of a JSON body; raw uploads are streamed and have no limit here."""
KEEPALIVE_S = 10.0
HEARTBEAT = b'{"type":"heartbeat"}\n'


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
    status: int = 200
    media_type: str = "application/json"
    public: bool = False
    """Needs no key."""


def error_body(error: DsecError) -> ErrorAnswer:
    """An error as it goes over the wire."""
    return ErrorAnswer(
        error=ErrorBody(
            code=error.code,
            message=error.message,
            retryable=error.retryable,
            request_id=log.request_id.get(),
            details=error.details,
        )
    )


def error_response(error: DsecError) -> Response:
    """An error as a response; a refusal that may pass says when to come back."""
    headers = {"Retry-After": "1"} if error.retryable else None
    return json_response(error_body(error), error.http_status, headers)


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
        case msgspec.ValidationError() | msgspec.DecodeError():
            return InvalidRequest(f"the request is not valid: {exc}")
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
    return msgspec.json.decode(b"".join(parts) or b"{}", type=shape)


def read_query(request: Request, shape: type[T]) -> T:
    """Read and check the query string; bytes that are not UTF-8 arrive as surrogates.

    Raises:
        InvalidRequest: a value is wrong, missing or unknown.
    """
    raw = request.scope["query_string"].decode("ascii", "surrogateescape")
    values: dict[str, object] = {}
    for key, value in parse_qsl(raw, keep_blank_values=True, errors="surrogateescape"):
        if key in values:
            earlier = values[key]
            values[key] = [*earlier, value] if isinstance(earlier, list) else [earlier, value]
        else:
            values[key] = value
    return msgspec.convert(values, shape, strict=False)


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
    status already sent (spec/rest.md). A client that goes away cancels the work.
    """

    def __init__(self, work: Callable[[], Awaitable[object]], status: int = 200) -> None:
        self._work = work
        self._status = status
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it (ASGI)."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep_alive, group, receive, send)
            try:
                answer = await self._work()
                response = json_response(answer, self._status)
            except Exception as exc:  # noqa: BLE001 - the HTTP boundary
                response = error_response(as_error(exc))
            group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            if self._begun:
                await send({"type": "http.response.body", "body": bytes(response.body)})
            else:
                await response(scope, receive, send)

    async def _keep_alive(self, group: anyio.abc.TaskGroup, receive: Receive, send: Send) -> None:
        while True:
            with anyio.move_on_after(KEEPALIVE_S):
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

    The status waits for the first event, so a failure before it has its own; a later failure is the
    stream's last line.
    """

    def __init__(self, events: AsyncGenerator[object, None]) -> None:
        self._events = events
        self._quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it (ASGI)."""
        async with anyio.create_task_group() as group:
            try:
                await self._serve(scope, receive, send, group)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._events.aclose()
                group.cancel_scope.cancel()

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, group: anyio.abc.TaskGroup
    ) -> None:
        group.start_soon(_cancel_on_disconnect, group, receive)
        try:
            first = await anext(self._events, None)
        except Exception as exc:  # noqa: BLE001 - the HTTP boundary
            await error_response(as_error(exc))(scope, receive, send)
            return
        await send(_start(200, "application/x-ndjson"))
        lock = anyio.Lock()
        group.start_soon(self._heartbeats, lock, send)
        if first is not None:
            await self._emit(lock, send, _line(first))
        try:
            async for event in self._events:
                await self._emit(lock, send, _line(event))
        except Exception as exc:  # noqa: BLE001 - the HTTP boundary
            error = as_error(exc)
            last = StreamError(
                code=error.code,
                message=error.message,
                details=error.details,
                http_status=error.http_status,
            )
            await self._emit(lock, send, _line(last))
        async with lock:
            await send({"type": "http.response.body", "body": b""})

    async def _emit(self, lock: anyio.Lock, send: Send, line: bytes) -> None:
        self._quiet = False
        async with lock:
            await send({"type": "http.response.body", "body": line, "more_body": True})

    async def _heartbeats(self, lock: anyio.Lock, send: Send) -> None:
        while True:
            await anyio.sleep(KEEPALIVE_S)
            if self._quiet:
                async with lock:
                    await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
            self._quiet = True


def _start(status: int, media_type: str) -> dict[str, object]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", media_type.encode())],
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
    """Gives each request an id, logs its end, and turns errors into answers (ASGI middleware)."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")[:64]
        token = log.request_id.set(given if given.isalnum() else secrets.token_hex(8))
        begun = self._clock.monotonic()
        status = 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", log.request_id.get().encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, counted_send)
        except ClientDisconnect:
            status = status or 499
        except Exception as exc:
            error = as_error(exc)
            if status:
                raise  # the server aborts the connection: never a clean end of a broken body
            await error_response(error)(scope, receive, counted_send)
        finally:
            logger.info(
                "request completed",
                extra={
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "ms": round((self._clock.monotonic() - begun) * 1000, 2),
                },
            )
            log.request_id.reset(token)


def make_app(
    routes: Sequence[Route],
    clock: Clock,
    *,
    extra: Sequence[BaseRoute] = (),
    lifespan: Lifespan[Starlette] | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] | None = None,
) -> ASGIApp:
    """An application from a table of routes.

    Args:
        routes: the table; the first match serves.
        clock: measures requests.
        extra: routes that are no plain request and response (WebSockets, mounts).
        lifespan: what runs around serving.
        wrap: inner middleware, e.g. authentication; errors it raises are answered like a handler's.
    """
    table = [
        StarletteRoute(route.path, _endpoint(route), methods=[route.method]) for route in routes
    ]
    # Starlette's own error pages never answer: every exception is ours to shape.
    app = Starlette(
        routes=[*table, *extra],
        lifespan=lifespan,
        exception_handlers={HTTPException: _reraise},
    )
    inner = wrap(app) if wrap else app
    return RequestContext(inner, clock)


def _endpoint(route: Route) -> Handler:
    async def endpoint(request: Request) -> Response | LateJson | Ndjson:
        try:
            return await route.handler(request)
        except Exception as exc:  # noqa: BLE001 - the HTTP boundary
            return error_response(as_error(exc))

    endpoint.__name__ = getattr(route.handler, "__name__", "endpoint")
    return endpoint


async def _reraise(_request: Request, exc: Exception) -> Response:
    return error_response(as_error(exc))


def describe(routes: Sequence[Route], title: str, version: str) -> dict[str, object]:
    """The OpenAPI 3.1 description of a table of routes."""
    shapes = [s for r in routes for s in (r.body, r.answer, r.query) if s is not None]
    schemas, components = msgspec.json.schema_components(
        [*shapes, ErrorAnswer], ref_template="#/components/schemas/{name}"
    )
    by_shape = dict(zip(map(repr, [*shapes, ErrorAnswer]), schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, by_shape, components
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
        "paths": paths,
    }


def _operation(
    route: Route, by_shape: dict[str, dict[str, object]], components: dict[str, object]
) -> dict[str, object]:
    content = {} if route.answer is None else {"schema": by_shape[repr(route.answer)]}
    answer: dict[str, object] = {"description": route.summary}
    if route.status != 204:
        answer["content"] = {route.media_type: content}
    operation: dict[str, object] = {
        "operationId": getattr(route.handler, "__name__", route.path),
        "summary": route.summary,
        "parameters": [*_path_parameters(route.path), *_query_parameters(route, components)],
        "responses": {
            str(route.status): answer,
            "default": {
                "description": "an error of the table in docs/reference/errors.md",
                "content": {"application/json": {"schema": by_shape[repr(ErrorAnswer)]}},
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_shape[repr(route.body)]}},
        }
    if route.public:
        operation["security"] = []
    return operation


def _path_parameters(path: str) -> list[dict[str, object]]:
    names = [part[1:-1].split(":")[0] for part in path.split("/") if part.startswith("{")]
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]


def _query_parameters(route: Route, components: dict[str, object]) -> list[dict[str, object]]:
    if route.query is None:
        return []
    schema = components[route.query.__name__]
    if not isinstance(schema, dict):
        return []
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": shape}
        for name, shape in schema.get("properties", {}).items()
    ]
