"""What is tried again after a failure, and what of it is on record."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from dsec.base.errors import Unavailable
from dsec.edge import commands
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.recording import Recording
from dsec.edge.recording_bodies import Answer
from dsec.kit.table import NDJSON
from dsec.wire.sandbox import StreamError
from tests.unit.edge.node import Node, request
from tests.unit.edge.test_recording import Used, _ended, _forget, used

APPEND = "echo x >> /tmp/f"


@asynccontextmanager
async def recorded(node: Node) -> AsyncIterator[tuple[Used, Owner, Recording]]:
    async with used(node) as box:
        owner = await box.edge.owner(box.id)
        yield box, owner, await box.edge.recordings.of(owner)


async def _away(*_: object) -> Any:
    raise Unavailable("the connection to the sandbox was renewed; ask again")


async def _unavailable(box: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(commands, "run", _away)
        assert (await box.run(APPEND, "c1")).status_code == 503


async def test_what_was_unavailable_is_recorded_anew_and_runs_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with used(node) as box:
        await _unavailable(box, monkeypatch)
        assert (await box.run(APPEND, "c1")).status_code == 200
        _forget(node, box.id)
        again = await box.run(APPEND, "c1")
        assert again.headers["x-recorded"] == "true"
        assert await box.read("/tmp/f") == b"x\n"
        outcomes = [entry.outcome for entry in await box.trajectory("?op=command")]
        assert outcomes == ["unavailable", "ok"]
        assert (await box.run("other", "c1")).status_code == 409


async def test_what_was_unavailable_is_recorded_anew_after_a_restart(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.host.running():
        asked = request()
        async with node.edge() as edge, node.client(edge) as client:
            await edge.create(asked)
            await _unavailable(Used(client, edge, asked.id), monkeypatch)
        async with node.edge() as edge, node.client(edge) as client:
            box = Used(client, edge, asked.id)
            assert (await box.run(APPEND, "c1")).status_code == 200
            _forget(node, box.id)
            assert (await box.run(APPEND, "c1")).headers["x-recorded"] == "true"
            assert await box.read("/tmp/f") == b"x\n"


async def test_those_who_try_again_at_once_share_one_record(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with used(node) as box:
        await _unavailable(box, monkeypatch)
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(box.run, APPEND, "c1")
        assert await box.read("/tmp/f") == b"x\n"
        assert len(await box.trajectory("?op=command")) == 2


async def test_one_callers_failure_is_not_the_end_of_anothers_command(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, waiting, failed = commands.run, anyio.Event(), anyio.Event()
    asked: list[int] = []

    async def first_away(*args: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            await waiting.wait()
            return await _away()
        waiting.set()
        await failed.wait()
        return await good(*args)

    async def ask(box: Used) -> None:
        if (await box.run(APPEND, "c1")).status_code == 503:
            failed.set()

    monkeypatch.setattr(commands, "run", first_away)
    async with used(node) as box:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(ask, box)
                group.start_soon(ask, box)
        _forget(node, box.id)
        assert (await box.run(APPEND, "c1")).headers["x-recorded"] == "true"
        assert await box.read("/tmp/f") == b"x\n"
        assert [entry.outcome for entry in await box.trajectory("?op=command")] == ["ok"]


async def test_an_end_is_awaited_once_however_often_it_is_asked_for(node: Node) -> None:
    async with recorded(node) as (box, owner, recording):
        body = {"argv": ["sleep", "0.2"], "command_id": "c1"}
        for _ in range(20):
            assert (await box.client.post(f"{box.place}/commands", json=body)).status_code == 201
            recording.heard = None  # asked for again with the next use
        assert owner.channel is not None
        assert len(owner.channel._sinks) == 1
        await _ended(box, "c1")
        assert recording.hearing == {}


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


async def test_an_end_that_could_not_be_written_is_asked_for_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with used(node) as box:
        body = {"shell": "sleep 0.2; echo x >> /tmp/f", "command_id": "c1"}
        await box.client.post(f"{box.place}/commands", json=body)
        with monkeypatch.context() as patched:
            patched.setattr("dsec.trajectory.writer.append", full)
            await _until(lambda: "an end could not be recorded" in caplog.messages)
        await box.run("true", "c2")
        await box.run("true", "c3")
        assert (await _ended(box, "c1")).result["exit_code"] == 0


async def _until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not true():  # noqa: ASYNC110 - nobody is told of it
            await anyio.sleep(0.005)


async def test_a_removal_that_failed_may_be_asked_for_again(node: Node) -> None:
    async with used(node) as box:
        node.faults.fail_cleans = 4
        assert (await box.client.delete(box.place)).status_code == 500
        assert node.host.sandboxes
        answer = await box.client.delete(box.place)
        assert (answer.status_code, answer.json()["state"]) == (200, "stopped")
        assert not node.host.sandboxes
        assert (await box.client.delete(box.place)).status_code == 200


async def test_a_second_removal_waits_for_the_first(node: Node) -> None:
    async with used(node) as box:
        gate, answers = node.faults.hold("clean"), list[httpx.Response]()

        async def remove(place: str) -> None:
            answers.append(await box.client.delete(place))

        async with anyio.create_task_group() as group:
            group.start_soon(remove, box.place)
            await _until(lambda: box.edge.peek(box.id).ended_at is not None)  # type: ignore[union-attr]
            group.start_soon(remove, f"/edge{box.place}")
            await anyio.wait_all_tasks_blocked()
            assert answers == []
            gate.set()
        assert [answer.status_code for answer in answers] == [200, 200]


BIG = b'{"x": 123456789012345678901234567890}'


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}])
async def test_a_number_beyond_64_bits_is_the_callers_mistake(
    node: Node, headers: dict[str, str]
) -> None:
    async with used(node) as box:
        answer = await box.client.post(f"{box.place}/sessions", content=BIG, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert [entry.op for entry in await box.trajectory()] == ["create"]


@pytest.mark.parametrize("where", ["stdin?offset=", "events?stdout_from="])
async def test_so_is_one_in_a_query(node: Node, where: str) -> None:
    async with used(node) as box:
        body = {"argv": ["cat"], "stdin": "pipe", "command_id": "c1"}
        await box.client.post(f"{box.place}/commands", json=body)
        url = f"{box.place}/commands/c1/{where}{10**30}"
        method = "POST" if where.startswith("stdin") else "GET"
        answer = await box.client.request(method, url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def _answered(
    *lines: bytes, status: int = 200, tells: bool = True
) -> tuple[str, dict[str, Any]]:
    async def nowhere(_: object) -> None:
        """Nobody listens."""

    async def over() -> None:
        """Nothing is recorded."""

    answer = Answer(nowhere, NDJSON, over, tells=tells)
    await answer({"type": "http.response.start", "status": status})
    for line in lines:
        await answer({"type": "http.response.body", "body": line, "more_body": True})
    await answer({"type": "http.response.body", "body": b"", "more_body": False})
    return answer.outcome()


async def test_a_stream_that_broke_is_recorded_as_what_broke_it() -> None:
    broken = msgspec.json.encode(StreamError(code="sandbox_gone", message="over")) + b"\n"
    made = b'{"index":0,"sandbox":{"id":"a"}}\n'
    assert await _answered(b'{"type":"heartbeat"}\n') == ("ok", {"size_bytes": 21})
    assert await _answered(b'{"x":1}\n', broken) == ("sandbox_gone", {"message": "over"})
    assert await _answered(b'{"x":1}\n' + broken) == ("sandbox_gone", {"message": "over"})
    assert await _answered(made) == ("ok", {"children": ["a"]})
    assert await _answered(made, broken) == ("ok", {"children": ["a"], "error": "over"})
    # A watch, say, is full of lines that are nobody's business.
    assert await _answered(made, tells=False) == ("ok", {"size_bytes": len(made)})
    refused = b'{"error":{"code":"conflict","message":"no"}}'
    assert await _answered(refused, status=409) == ("conflict", {"message": "no"})
