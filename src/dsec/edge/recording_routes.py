"""Records what the routes of a sandbox do, in one place: arguments, outcome, answer.

`recorded_routes` wraps the handlers of operations (`recording_ops`). A request is recorded before
its handler sees it, and its outcome before the last byte of the answer leaves. With an
`Idempotency-Key`, a repeat of a request gets the recorded answer; the same key for another request
is a Conflict.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

import anyio
import msgspec
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsec.base.errors import Conflict, Interrupted, SandboxGone
from dsec.base.ids import MAX_KEY_LENGTH
from dsec.edge.recording import Known, Recording
from dsec.edge.recording_bodies import INTERRUPTED, Answer, RequestBody
from dsec.edge.recording_commands import Caller
from dsec.edge.recording_ops import OPS, STOP, Op
from dsec.edge.recording_values import bounded, digest_of
from dsec.edge.service import EdgeService
from dsec.kit.http import Handler, Route, as_error, json_response, key_of
from dsec.trajectory.format import Ended
from dsec.trajectory.index import OK
from dsec.wire.edge_v1 import PRINCIPAL_HEADER
from dsec.wire.public_v1 import BatchItem

RECORDED = (b"x-recorded", b"true")
"""Header of an answer that is an old one."""
_MARK = "dsec.from_record"
_NAMES = {"cid": "command_id", "sid": "session_id"}


def recorded_routes(routes: Sequence[Route], service: EdgeService) -> list[Route]:
    """The same table, whose operations are recorded."""
    return [_recorded(route, service) for route in routes]


def _recorded(route: Route, service: EdgeService) -> Route:
    op = OPS.get((route.method, route.path))
    if op is None:
        return route
    operation = _Operation(op, route, service)

    async def handle(_request: Request) -> Any:
        return operation

    return dataclasses.replace(route, handler=handle)


def caller_of(request: Request) -> Caller:
    """Who sends a request. An answer from the record is marked as one if it is `Marked`."""

    def mark() -> None:
        request.scope[_MARK] = True

    return Caller(request.headers.get(PRINCIPAL_HEADER, ""), mark)


@contextlib.asynccontextmanager
async def recorded(
    recording: Recording, op: Op, args: dict[str, Any], connection: HTTPConnection
) -> AsyncIterator[None]:
    """Record what goes on inside, from its beginning to its end or failure."""
    principal = connection.headers.get(PRINCIPAL_HEADER, "")
    seq = await recording.attempt(op.name, caller=principal, args=args)
    try:
        yield
    except Exception as exc:
        error = as_error(exc)
        await recording.end(seq, error.code, {"message": error.message})
        if error is exc:
            raise
        raise error from exc
    finally:
        with anyio.CancelScope(shield=True):
            await recording.end(seq, OK)


class Marked:
    """An answer that says so if it is an old one (ASGI)."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it (ASGI)."""

        async def marking(message: Message) -> None:
            if message["type"] == "http.response.start" and _MARK in scope:
                message["headers"] = [*message.get("headers", []), RECORDED]
            await send(message)

        await self._inner(scope, receive, marking)


class _Operation:
    """A route whose requests are recorded (ASGI)."""

    def __init__(self, op: Op, route: Route, service: EdgeService) -> None:
        self._op = op
        self._route = route
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        recording = await self._recording(request.path_params["id"])
        if recording is None:
            await _serve(self._route.handler, scope, receive, send)
            return
        body = RequestBody(receive)
        args = await self._arguments(request, body)
        if key := key_of(request) if self._op.replayed else "":
            async with recording.turns.alone(key):
                await self._once(_Request(scope, body, send, args, key), recording)
        elif key := _claimed(args) if self._op.claims else "":
            await self._also(_Request(scope, body, send, args, key), recording)
        else:
            await self._perform(_Request(scope, body, send, args), recording)

    async def _recording(self, sandbox: str) -> Recording | None:
        """Of a sandbox; None: the handler waits for it, says why there is none, or removes its rest."""
        owner = self._service.peek(sandbox)
        if owner is None or (self._op is STOP and owner.ended_at is not None):
            return None
        try:
            return await self._service.recordings.of(owner)
        except SandboxGone:
            if self._op is STOP:
                return None
            raise

    async def _arguments(self, request: Request, body: RequestBody) -> dict[str, Any]:
        args = {_NAMES.get(k, k): v for k, v in request.path_params.items() if k != "id"}
        raw = request.scope["query_string"].decode("ascii", "surrogateescape")
        args |= parse_qsl(raw, keep_blank_values=True, errors="backslashreplace")
        if self._route.body is not None:
            args |= _object(await body.whole())
        return args

    async def _once(self, asked: _Request, recording: Recording) -> None:
        known = await recording.known(self._op.name, asked.key, self._digest(asked))
        if known is not None and known.ended is not None:
            await self._again(asked, known.ended)
        elif known is not None and not self._op.may_repeat(asked.args):
            raise _interrupted(known)
        else:
            await self._perform(asked, recording)

    async def _also(self, asked: _Request, recording: Recording) -> None:
        """A repeat finds by itself what was done; all it must not be is another request."""
        known = await recording.known(self._op.name, asked.key, self._digest(asked))
        if known is not None:
            asked = dataclasses.replace(asked, key="")
        await self._perform(asked, recording)

    def _digest(self, asked: _Request) -> bytes:
        if not asked.key:
            return b""
        return digest_of(self._route.method, self._route.path, asked.args)

    async def _again(self, asked: _Request, ended: Ended) -> None:
        """Answer from the record."""
        if ended.digest:
            await asked.body.drain()
            if asked.body.digest != ended.digest:
                raise Conflict("the idempotency key was used for other content", kind="key")
        headers = {RECORDED[0].decode(): RECORDED[1].decode()}
        status = self._route.status
        if self._route.answer is None:
            response = Response(status_code=status, headers=headers)
        else:
            response = json_response(ended.result, status, headers)
        await response(asked.scope, asked.body, asked.send)

    async def _begin(self, asked: _Request, recording: Recording) -> int:
        try:
            return await recording.attempt(
                self._op.name,
                ident=asked.key,
                caller=asked.principal,
                args=bounded(asked.args),
                digest=self._digest(asked),
            )
        except SandboxGone:
            if self._op is STOP:
                return 0  # it is over, and what is left of it can still be removed
            raise

    async def _perform(self, asked: _Request, recording: Recording) -> None:
        """Do it, with its beginning and its end on record."""
        seq = await self._begin(asked, recording)
        streamed = self._route.body is None

        async def over(outcome: str = "", result: dict[str, Any] | None = None) -> None:
            if not outcome:
                outcome, result = answer.outcome()
            digest, size = (asked.body.digest, asked.body.size_bytes) if streamed else (b"", 0)
            small = asked.body.small if streamed else b""
            await recording.end(seq, outcome, result, digest=digest, size_bytes=size, body=small)

        answer = Answer(asked.send, self._route.media_type, over, tells=_tells(self._route))
        try:
            await _serve(self._route.handler, asked.scope, asked.body, answer)
        except ClientDisconnect:
            raise
        except Exception as exc:
            error = as_error(exc)
            await over(error.code, {"message": error.message})
            if error is exc:
                raise
            raise error from exc
        finally:  # if the answer was broken off, nobody knows; else this is the second time
            with anyio.CancelScope(shield=True):
                await over(INTERRUPTED)


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    scope: Scope
    body: RequestBody
    send: Send
    args: dict[str, Any]
    key: str = ""

    @property
    def principal(self) -> str:
        return Request(self.scope).headers.get(PRINCIPAL_HEADER, "")


async def _serve(handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
    response = await handler(Request(scope, receive, send))
    await response(scope, receive, send)


def _tells(route: Route) -> bool:
    """Whether the answer is a stream that tells of sandboxes made."""
    return isinstance(route.answer, tuple) and BatchItem in route.answer


def _claimed(args: dict[str, Any]) -> str:
    """The key in a body, if it may be one; what may not is refused by the handler."""
    key = args.get("key")
    return key if isinstance(key, str) and len(key) <= MAX_KEY_LENGTH else ""


def _object(body: bytes) -> dict[str, Any]:
    """A JSON body's fields; what is none is left to the handler."""
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _interrupted(known: Known) -> Interrupted:
    op = known.begun.op if known.begun else "the operation"
    return Interrupted(
        f"{op} was interrupted: it may or may not have happened; look before you do it again",
        kind="interrupted",
    )
