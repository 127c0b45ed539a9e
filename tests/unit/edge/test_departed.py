"""Clients that leave while the sandbox takes nothing of what they sent."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.websockets import WebSocket

from dsec.edge.channel import AetherStream
from dsec.edge.server import make_edge_app
from dsec.edge.service import EdgeService
from dsec.edge.streams import relay
from dsec.wire.frames import INITIAL_CREDIT, Kind
from tests.unit.edge.node import Node, request
from tests.unit.edge.peer import talking


@pytest.fixture
def no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes more than what may be sent unasked."""
    real = AetherStream.push

    def push(self: AetherStream, kind: int, channel: int, payload: bytes) -> None:
        if kind != Kind.CREDIT:
            real(self, kind, channel, payload)

    monkeypatch.setattr(AetherStream, "push", push)


class Client:
    """An ASGI client that has sent something and leaves when told to."""

    def __init__(self, *messages: dict[str, Any], last: str) -> None:
        self.leave = anyio.Event()
        self._messages = list(messages)
        self._last = last

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self.leave.wait()
        return {"type": self._last}

    async def send(self, _message: Any) -> None:
        pass


async def busy_until_left(
    node: Node, edge: EdgeService, sandbox: str, scope: dict[str, Any], client: Client
) -> None:
    owner = await edge.owner(sandbox)
    app: Any = make_edge_app(edge, node.clock)
    whole = {
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "server": ("a", 1),
        "client": ("b", 2),
        "root_path": "",
        "raw_path": scope["path"].encode(),
        **scope,
    }
    async with anyio.create_task_group() as group:
        group.start_soon(app, whole, client.receive, client.send)
        with anyio.fail_after(10):
            while not owner.busy:  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.01)
        await anyio.wait_all_tasks_blocked()
        assert owner.busy
        client.leave.set()
        with anyio.fail_after(10):
            while owner.busy:  # noqa: ASYNC110 - likewise
                await anyio.sleep(0.01)


BODY = {"type": "http.request", "body": bytes(2 * INITIAL_CREDIT), "more_body": True}


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [("PUT", "files", b"path=/tmp/x"), ("PUT", "tree", b"path=/tmp")],
)
async def test_an_upload(node: Node, no_credit: None, method: str, path: str, query: bytes) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        scope = {
            "type": "http",
            "method": method,
            "scheme": "http",
            "path": f"/v1/sandboxes/{asked.id}/{path}",
            "query_string": query,
        }
        client = Client(BODY, last="http.disconnect")
        await busy_until_left(node, edge, asked.id, scope, client)


async def test_a_tunnel() -> None:
    """A program inside that reads nothing: the tunnel ends with its client all the same."""
    sent = {"type": "websocket.receive", "bytes": bytes(2 * INITIAL_CREDIT)}
    client = Client({"type": "websocket.connect"}, sent, last="websocket.disconnect")
    scope = {"type": "websocket", "path": "/", "headers": []}
    async with talking() as (channel, peer), anyio.create_task_group() as group:

        @contextlib.asynccontextmanager
        async def connecting() -> AsyncIterator[AetherStream]:
            async with channel.open("connect") as stream:
                yield stream

        socket = WebSocket(scope, client.receive, client.send)
        group.start_soon(relay, socket, connecting)
        while (await peer.frame()).kind is not Kind.DATA:
            pass
        await anyio.wait_all_tasks_blocked()
        assert channel.busy
        client.leave.set()
        with anyio.fail_after(10):
            while channel.busy:  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.01)
