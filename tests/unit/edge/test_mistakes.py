"""What is asked for wrongly is refused, with a word on what would be right, and does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from dsec.base.errors import InvalidRequest
from dsec.edge.recording_ops import NAMES, PORT
from dsec.edge.recording_routes import recorded
from tests.unit.edge.node import Node
from tests.unit.edge.test_recording import used

GLOBS = [
    "",
    "etc/x",
    "./a",
    "/a/../b",
    "//a",
    "/[a",
    "/a]",
    "/{a,b}",
    "/",
    "/x**",
    "/" + "a" * 1001,
]


async def refused(node: Node, method: str, path: str, **how: Any) -> str:
    async with used(node) as box:
        before = len(await box.trajectory())
        answer = await box.client.request(method, f"{box.place}/{path}", **how)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_request")
        done = [entry for entry in (await box.trajectory())[before:] if entry.outcome == "ok"]
        assert done == []
        message: str = error["message"]
        return message


@pytest.mark.parametrize("what", ["commands", "commands/run", "commands/stream"])
async def test_an_empty_command_id(node: Node, what: str) -> None:
    body = {"argv": ["true"], "command_id": ""}
    assert "1 to 64 letters" in await refused(node, "POST", what, json=body)


async def test_a_command_of_a_session_without_a_name(node: Node) -> None:
    body = {"argv": ["true"], "session": ""}
    assert "session id" in await refused(node, "POST", "commands/run", json=body)


async def test_an_empty_session_id(node: Node) -> None:
    assert "session id" in await refused(node, "POST", "sessions", json={"session_id": ""})


async def test_an_empty_idempotency_key(node: Node) -> None:
    headers = {"Idempotency-Key": ""}
    assert "leave it out" in await refused(node, "POST", "pause", headers=headers)


@pytest.mark.parametrize("query", ["op=bogus", "op=command&op=bogus", "op="])
async def test_an_operation_there_is_not(node: Node, query: str) -> None:
    said = await refused(node, "GET", f"trajectory?{query}")
    assert "file.write" in said
    assert "port.open" in said


@pytest.mark.parametrize("query", ["since=0", "until=0"])
async def test_an_entry_there_cannot_be(node: Node, query: str) -> None:
    await refused(node, "GET", f"trajectory?{query}")


async def test_every_operation_there_is_may_be_asked_for(node: Node) -> None:
    async with used(node) as box:
        await box.run("true", "c1")
        known = {entry.op for entry in await box.trajectory()}
        assert known <= NAMES
        asked = "&".join(f"op={name}" for name in sorted(NAMES))
        assert {entry.op for entry in await box.trajectory(f"?{asked}")} == known


@pytest.mark.parametrize("glob", GLOBS)
async def test_odd_globs_of_a_snapshot(node: Node, glob: str) -> None:
    said = await refused(node, "POST", "pack", json={"name": "built", "exclude": [glob]})
    assert "exclude" in said


async def test_a_fork_of_none(node: Node) -> None:
    assert "count" in await refused(node, "POST", "fork", json={"count": 0})


async def test_whatever_a_tunnel_fails_of_is_on_record(node: Node) -> None:
    class Connection:
        headers: Mapping[str, str] = MappingProxyType({})

    async with used(node) as box:
        recording = await box.edge.recordings.of(await box.edge.owner(box.id))
        with pytest.raises(Exception, match="incident"):
            async with recorded(recording, PORT, {"port": 80}, Connection()):  # type: ignore[arg-type]
                raise ZeroDivisionError
        with pytest.raises(InvalidRequest) as caught:
            async with recorded(recording, PORT, {"port": 0}, Connection()):  # type: ignore[arg-type]
                raise InvalidRequest("no such port")
        assert caught.value.__cause__ is None
        async with recorded(recording, PORT, {"port": 81}, Connection()):  # type: ignore[arg-type]
            pass
        opened = [entry for entry in await box.trajectory() if entry.op == PORT.name]
        assert [entry.outcome for entry in opened] == ["internal_error", "invalid_request", "ok"]
