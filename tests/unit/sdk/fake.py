"""A platform that answers as it is told to, over ASGI, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import anyio
import msgspec

from dsec.base.errors import DsecError, NotFound
from dsec.base.states import SandboxState
from dsec.wire.public_v1 import ErrorAnswer, ErrorBody, Version
from dsec.wire.sandbox import (
    Captured,
    CommandResult,
    CommandView,
    Limits,
    SandboxView,
)

Message = MutableMapping[str, Any]
SANDBOX = "sbx0000000000000000000a"


@dataclass
class Seen:
    method: str
    path: str
    query: dict[str, str]
    raw_query: bytes
    headers: dict[str, str]
    body: bytes = b""
    raw_path: bytes = b""
    client: tuple[str, int] | None = None

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


@dataclass
class Reply:
    status: int = 200
    chunks: list[bytes] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    """The body breaks off after the chunks."""
    unread: bool = False
    """Answer without reading the request's body."""
    hang: bool = False
    """Nothing more comes after the chunks."""


class Aborted(Exception):
    pass


def json(value: object, status: int = 200, **headers: str) -> Reply:
    named = {key.replace("_", "-"): text for key, text in headers.items()}
    return Reply(status, [msgspec.json.encode(value)], named)


def lines(*values: object, broken: bool = False, hang: bool = False) -> Reply:
    return Reply(
        200, [msgspec.json.encode(value) + b"\n" for value in values], broken=broken, hang=hang
    )


def error(exc: DsecError, **headers: str) -> Reply:
    body = ErrorBody(
        code=exc.code, message=exc.message, retryable=exc.retryable, details=exc.details
    )
    return json(ErrorAnswer(error=body), exc.http_status, **headers)


def sandbox(name: str = SANDBOX, **changes: Any) -> SandboxView:
    fields: dict[str, Any] = {
        "id": name,
        "node": "0000",
        "backend": "container",
        "image": "debian",
        "state": SandboxState.RUNNING,
        "created_at": 1.0,
        "limits": Limits(),
    }
    return SandboxView(**(fields | changes))


def result(out: bytes = b"", code: int = 0, **changes: Any) -> CommandResult:
    fields: dict[str, Any] = {
        "command_id": "cmd1",
        "argv": ["true"],
        "exit_code": code,
        "stdout": Captured(head=out),
    }
    return CommandResult(**(fields | changes))


def command(name: str = "cmd1", **changes: Any) -> CommandView:
    return CommandView(command_id=name, **changes)


Handler = Callable[[Seen], Reply | Awaitable[Reply]]


class FakePlatform:
    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.closed_ports = False
        self._script: dict[tuple[str, str], list[Reply | Handler]] = {}
        self.on("GET", "/v1/version", json(Version(version="0.1.0")))
        self.on("GET", f"/v1/sandboxes/{SANDBOX}", json(sandbox()))
        self.on("DELETE", f"/v1/sandboxes/{SANDBOX}", json(sandbox(state=SandboxState.STOPPED)))

    def on(self, method: str, path: str, *replies: Reply | Handler) -> None:
        """One reply for each request in turn; the last goes on."""
        self._script[method, path] = list(replies)

    def sandbox(self, method: str, path: str, *replies: Reply | Handler) -> None:
        self.on(method, f"/v1/sandboxes/{SANDBOX}{path}", *replies)

    def calls(self, method: str, path: str) -> list[Seen]:
        return [s for s in self.seen if s.method == method and s.path.endswith(path)]

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._echo(receive, send)
            return
        seen = _request(scope)
        self.seen.append(seen)
        replies = self._script.get((seen.method, seen.path))
        if replies is None:
            await _respond(json({"error": {"code": "not_found", "message": seen.path}}, 404), send)
            return
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if not (isinstance(reply, Reply) and reply.unread):
            seen.body = await _body(receive)
        if not isinstance(reply, Reply):
            made = reply(seen)
            reply = made if isinstance(made, Reply) else await made
        await _respond(reply, send)

    async def _echo(self, receive: Any, send: Any) -> None:
        await receive()
        if self.closed_ports:
            refusal = error(NotFound("connection refused", kind="port"))
            start = {"status": 404, "headers": [(b"content-type", b"application/json")]}
            await send({"type": "websocket.http.response.start", **start})
            await send({"type": "websocket.http.response.body", "body": refusal.chunks[0]})
            return
        await send({"type": "websocket.accept"})
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            await send({"type": "websocket.send", "bytes": message["bytes"]})


def _request(scope: Message) -> Seen:
    raw = scope["query_string"]
    query = dict(parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="surrogateescape"))
    headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
    return Seen(
        scope["method"],
        scope["path"],
        query,
        raw,
        headers,
        raw_path=scope["raw_path"],
        client=scope["client"],
    )


async def _body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Aborted
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


async def _respond(reply: Reply, send: Any) -> None:
    if reply.status == 0:
        raise Aborted
    headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    for data in reply.chunks:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    if reply.hang:
        await anyio.sleep_forever()
    if reply.broken:
        raise Aborted
    await send({"type": "http.response.body", "body": b""})


LOST = Reply(status=0)
"""The connection is lost before any answer."""
