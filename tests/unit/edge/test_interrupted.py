"""What was going on when the edge was killed: what is said of it, and what asking again gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from dsec.edge.histories import TRAJECTORY
from dsec.edge.recording_values import digest_of
from dsec.trajectory import writer
from dsec.trajectory.format import Begun, Entry, Frames, decode, frame
from dsec.wire.sandbox import CommandSpec
from tests.unit.edge.node import Node, request
from tests.unit.edge.test_recording import Used, _ended

FILES = "/v1/sandboxes/{id}/files"
APPEND = {"path": "/tmp/f", "append": "true"}
MOVE = {"path": "/tmp/a", "to": "/tmp/b"}
ECHO = "echo x >> /tmp/f"


def begun(seq: int, op: str, ident: str = "", digest: bytes = b"", **args: Any) -> bytes:
    return frame(Begun(seq, 1.0, op, ident, "me", digest, args))


def command(seq: int, ident: str) -> bytes:
    """The beginning of `ECHO`, as a killed edge leaves it."""
    facts = msgspec.to_builtins(CommandSpec(shell=ECHO))
    facts.pop("command_id", None)
    return begun(seq, "command", ident, digest_of(facts), shell=ECHO)


@asynccontextmanager
async def killed(node: Node, *left: bytes, running: bool = False) -> AsyncIterator[Used]:
    """A sandbox whose edge was killed when all it had written was this."""
    async with node.host.running():
        asked = request()
        async with node.edge() as edge, node.client(edge) as client:
            await edge.create(asked)
            if running:
                body = {"argv": ["cat"], "stdin": "pipe", "command_id": "runs"}
                await client.post(f"/v1/sandboxes/{asked.id}/commands", json=body)
        add(node.root / "state" / "sandboxes" / asked.id / TRAJECTORY, *left)
        async with node.edge() as edge, node.client(edge) as client:
            yield Used(client, edge, asked.id)


def _entries(path: Path) -> list[Entry]:
    with path.open("rb") as file:
        return [entry for _, payload in Frames(file) if (entry := decode(payload))]


def add(path: Path, *frames: bytes) -> None:
    writer.append(path, b"".join(frames))


async def outcomes(box: Used, query: str = "") -> list[tuple[str, str]]:
    return [(entry.op, entry.outcome) for entry in await box.trajectory(query)]


async def test_what_the_edge_did_itself_was_interrupted_with_it(node: Node) -> None:
    left = [begun(2, "file.write", path="/a"), begun(3, "pause"), begun(4, "port.open")]
    async with killed(node, *left) as box:
        told = await box.trajectory()
        assert [entry.outcome for entry in told] == ["ok", *["interrupted"] * 3]
        assert [entry.ended_at is None for entry in told] == [False, True, True, True]
        await box.run("true", "c1")
        assert (await outcomes(box))[-1] == ("command", "ok")
        assert (await outcomes(box))[1] == ("file.write", "interrupted")


async def test_nothing_is_written_of_it(node: Node) -> None:
    async with killed(node, begun(2, "pause")) as box:
        path = node.root / "state" / "sandboxes" / box.id / TRAJECTORY
        before = path.read_bytes()
        assert (await outcomes(box))[1] == ("pause", "interrupted")
        assert path.read_bytes() == before


async def test_a_command_that_outlived_the_edge_goes_on_and_ends(node: Node) -> None:
    async with killed(node, running=True) as box:
        (entry,) = await box.trajectory("?op=command")
        assert (entry.outcome, entry.ended_at) == ("", None)
        await box.client.post(f"{box.place}/commands/runs/stdin?offset=0&eof=1", content=b"said")
        entry = await _ended(box, "runs")
        assert (entry.outcome, entry.stdout and entry.stdout.head) == ("ok", b"said")


async def test_a_command_that_ended_while_no_edge_was_there_has_its_end(node: Node) -> None:
    async with node.host.running():
        asked = request()
        async with node.edge() as edge, node.client(edge) as client:
            await edge.create(asked)
            await Used(client, edge, asked.id).run(ECHO, "c1")
        path = node.root / "state" / "sandboxes" / asked.id / TRAJECTORY
        frames = [frame(entry) for entry in _entries(path) if entry != _entries(path)[-1]]
        path.unlink()
        writer.create(path)
        add(path, *frames)  # killed before it wrote the end, and after aether knew it
        async with node.edge() as edge, node.client(edge) as client:
            (entry,) = await Used(client, edge, asked.id).trajectory("?op=command")
            assert (entry.outcome, entry.result["exit_code"]) == ("ok", 0)


async def test_a_command_that_never_began_is_interrupted_until_it_is_asked_for(node: Node) -> None:
    async with killed(node, command(2, "c1")) as box:
        assert await outcomes(box, "?op=command") == [("command", "interrupted")]
        for _ in range(2):
            assert (await box.run(ECHO, "c1")).status_code == 200
        assert await box.read("/tmp/f") == b"x\n"
        assert await outcomes(box, "?op=command") == [("command", "ok")]


async def test_a_command_of_one_that_stands_still_may_go_on(node: Node) -> None:
    async with killed(node, running=True) as box:
        await box.edge.pause(box.id)
        assert await outcomes(box, "?op=command") == [("command", "")]
        assert (await box.edge.get(box.id)).state == "paused"


async def test_what_this_life_does_goes_on(node: Node) -> None:
    async with killed(node, begun(2, "pause")) as box:
        body = {"shell": "sleep 60", "command_id": "new"}
        await box.client.post(f"{box.place}/commands", json=body)
        assert await outcomes(box) == [("create", "ok"), ("pause", "interrupted"), ("command", "")]


async def test_nothing_goes_on_in_one_that_is_over(node: Node) -> None:
    async with killed(node, begun(2, "pause")) as box:
        body = {"shell": "sleep 60", "command_id": "cut"}
        await box.client.post(f"{box.place}/commands", json=body)
        await box.edge.stop(box.id)
        told = dict(await outcomes(box))
        assert (told["pause"], told["command"], told["over"]) == (
            "interrupted",
            "interrupted",
            "ok",
        )


@pytest.mark.parametrize(
    ("seq_op", "method", "query"),
    [("file.move", "POST", MOVE), ("file.remove", "DELETE", {"path": "/tmp/a"})],
)
async def test_what_must_not_be_done_twice_is_not(
    node: Node, seq_op: str, method: str, query: dict[str, str]
) -> None:
    path = FILES + ("/move" if method == "POST" else "")
    async with killed(node, begun(2, seq_op, "k", digest_of(method, path, query), **query)) as box:
        await box.write("/tmp/a", b"1", "k1")
        url, headers = path.format(id=box.id), {"Idempotency-Key": "k"}
        for _ in range(2):
            unknown = await box.client.request(method, url, params=query, headers=headers)
            _assert_unknown(unknown)
        assert await box.read("/tmp/a") == b"1"


async def test_an_append_is_not_done_twice(node: Node) -> None:
    digest = digest_of("PUT", FILES, APPEND)
    async with killed(node, begun(2, "file.write", "k", digest, **APPEND)) as box:
        _assert_unknown(await box.write("/tmp/f", b"x", "k", append="true"))
        assert (await box.write("/tmp/f", b"y", "k2", append="true")).status_code == 200
        assert await box.read("/tmp/f") == b"y"


async def test_what_may_be_done_again_is_and_has_an_entry_of_its_own(node: Node) -> None:
    args = {"path": "/tmp/f"}
    digest = digest_of("PUT", FILES, args)
    async with killed(node, begun(2, "file.write", "k", digest, **args)) as box:
        assert (await box.write("/tmp/f", b"x", "k")).status_code == 200
        assert (await box.write("/tmp/f", b"x", "k")).headers["x-recorded"] == "true"
        assert (await outcomes(box))[1:] == [("file.write", "interrupted"), ("file.write", "ok")]


def _assert_unknown(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (504, "interrupted")
    assert "may or may not have happened" in error["message"]
