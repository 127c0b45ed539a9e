"""What happens in a sandbox is on record, and happens once."""

from __future__ import annotations

import base64
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest

from dsec.edge import appending
from dsec.edge.service import EdgeService
from dsec.trajectory.reader import read
from dsec.wire.edge_v1 import PRINCIPAL_HEADER
from dsec.wire.sandbox import Recorded
from tests.unit.edge.node import Node, request

ME = {PRINCIPAL_HEADER: "me"}


@dataclass
class Used:
    """A sandbox, used over HTTP."""

    client: httpx.AsyncClient
    edge: EdgeService
    id: str

    @property
    def place(self) -> str:
        return f"/v1/sandboxes/{self.id}"

    async def run(self, shell: str, command: str, **more: Any) -> httpx.Response:
        body = {"shell": shell, "command_id": command, **more}
        return await self.client.post(f"{self.place}/commands/run", json=body, headers=ME)

    async def write(self, path: str, data: bytes, key: str, **more: str) -> httpx.Response:
        query = {"path": path, **more}
        headers = {"Idempotency-Key": key}
        return await self.client.put(
            f"{self.place}/files", params=query, content=data, headers=headers
        )

    async def post(self, what: str, key: str = "", **query: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        return await self.client.post(f"{self.place}/{what}", params=query, headers=headers)

    async def read(self, path: str) -> bytes:
        return (await self.client.get(f"{self.place}/files", params={"path": path})).content

    async def trajectory(self, query: str = "") -> list[Recorded]:
        answer = await self.client.get(f"{self.place}/trajectory{query}")
        assert answer.status_code == 200, answer.text
        return [msgspec.json.decode(line, type=Recorded) for line in answer.content.splitlines()]


@asynccontextmanager
async def used(node: Node) -> AsyncIterator[Used]:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        async with node.client(edge) as client:
            yield Used(client, edge, asked.id)


def out(answer: httpx.Response) -> bytes:
    assert answer.status_code == 200, answer.text
    return base64.b64decode(answer.json()["stdout"].get("head", ""))


async def test_creation_is_the_first_entry(node: Node) -> None:
    async with used(node) as box:
        (entry,) = await box.trajectory()
        assert (entry.seq, entry.op, entry.outcome) == (1, "create", "ok")
        assert entry.args["spec"]["image"] == "debian"
        assert entry.args["environment"].startswith("sha256:")
        assert entry.ended_at is not None


async def test_a_command_is_on_record(node: Node) -> None:
    async with used(node) as box:
        await box.run("echo hi; echo no >&2; exit 3", "c1", env={"A": "1"})
        entry = (await box.trajectory("?op=command"))[0]
        assert (entry.id, entry.caller, entry.outcome) == ("c1", "me", "ok")
        assert entry.args == {"shell": "echo hi; echo no >&2; exit 3", "env": {"A": "1"}}
        assert entry.result["exit_code"] == 3
        assert entry.stdout is not None
        assert entry.stderr is not None
        assert (entry.stdout.head, entry.stderr.head) == (b"hi\n", b"no\n")


async def test_a_repeat_has_the_recorded_result(node: Node) -> None:
    async with used(node) as box:
        first = await box.run("echo x >> /tmp/f; cat /tmp/f", "c1")
        again = await box.run("echo x >> /tmp/f; cat /tmp/f", "c1")
        assert out(first) == out(again) == b"x\n"
        assert "x-recorded" not in first.headers
        assert again.headers["x-recorded"] == "true"
        assert first.json() == again.json()
        assert await box.read("/tmp/f") == b"x\n"


async def test_another_command_under_the_same_id_is_refused(node: Node) -> None:
    async with used(node) as box:
        await box.run("true", "c1")
        other = await box.run("false", "c1")
        assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
        limited = await box.run("true", "c1", timeout_s=5)
        assert limited.status_code == 409


async def test_an_id_is_not_used_for_two_kinds_of_operations(node: Node) -> None:
    async with used(node) as box:
        assert (await box.write("/a", b"1", key="step-1")).status_code == 200
        answer = await box.run("echo x", "step-1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        assert (await box.run("echo x", "step-2")).status_code == 200
        assert (await box.write("/b", b"1", key="step-2")).status_code == 409
        assert (await box.post("commands/step-1/signal", "step-3", signal=1)).status_code != 409
        names = [
            entry.id for entry in await box.trajectory() if entry.op in ("command", "file.write")
        ]
        assert names == ["step-1", "step-2"]


async def test_those_who_ask_at_once_share_one_run(node: Node) -> None:
    async with used(node) as box:
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(out(await box.run("echo x >> /tmp/f; cat /tmp/f", "c1")))

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(ask)
        assert answers == [b"x\n"] * 8
        assert len(await box.trajectory("?op=command")) == 1


async def test_a_restarted_edge_answers_from_the_record(node: Node) -> None:
    async with node.host.running():
        asked = request()
        async with node.edge() as edge:
            await edge.create(asked)
            async with node.client(edge) as client:
                first = await Used(client, edge, asked.id).run("echo x >> /tmp/f", "c1")
        async with node.edge() as edge, node.client(edge) as client:
            box = Used(client, edge, asked.id)
            again = await box.run("echo x >> /tmp/f", "c1")
            assert again.json() == first.json()
            assert again.headers["x-recorded"] == "true"
            assert (await box.run("other", "c1")).status_code == 409
            assert await box.read("/tmp/f") == b"x\n"


async def test_what_aether_has_forgotten_is_answered_from_the_record(node: Node) -> None:
    async with used(node) as box:
        await box.run("echo hi; echo no >&2", "c1")
        _forget(node, box.id)
        assert out(await box.run("echo hi; echo no >&2", "c1")) == b"hi\n"
        view = await box.client.get(f"{box.place}/commands/c1")
        assert view.json()["exit_code"] == 0
        assert out(await box.client.get(f"{box.place}/commands/c1/result")) == b"hi\n"
        query = "stdout_from=1&stderr_from=0"
        said = await box.client.get(f"{box.place}/commands/c1/events?{query}")
        events = [msgspec.json.decode(line) for line in said.content.splitlines()]
        assert [event["type"] for event in events] == ["started", "output", "output", "exited"]
        assert [event.get("data") for event in events[1:3]] == ["aQo=", "bm8K"]


def _forget(node: Node, sandbox: str) -> None:
    node.host.sandboxes[sandbox].commands.by_id.clear()


async def test_a_long_output_is_had_from_aether_while_it_is_there(node: Node) -> None:
    async with used(node) as box:
        line = "seq 20000"
        whole = (await box.run(line, "c1")).json()
        assert (await box.run(line, "c1")).json()["stdout"] == whole["stdout"]
        _forget(node, box.id)
        short = (await box.run(line, "c1")).json()
        kept = base64.b64decode(short["stdout"]["head"]), base64.b64decode(short["stdout"]["tail"])
        assert [len(part) for part in kept] == [32 << 10, 32 << 10]
        everything = base64.b64decode(whole["stdout"]["head"])
        everything += base64.b64decode(whole["stdout"].get("tail", ""))
        assert everything.startswith(kept[0])
        assert everything.endswith(kept[1])
        assert short["stdout"]["dropped_bytes"] == len(everything) - (64 << 10)


async def test_the_end_of_what_nobody_waits_for_is_recorded(node: Node) -> None:
    async with used(node) as box:
        body = {"shell": "sleep 0.1; echo done", "command_id": "c1"}
        answer = await box.client.post(f"{box.place}/commands", json=body)
        assert answer.status_code == 201
        assert (await box.trajectory("?op=command"))[0].ended_at is None
        entry = await _ended(box, "c1")
        assert entry.stdout is not None
        assert (entry.result["exit_code"], entry.stdout.head) == (0, b"done\n")


async def test_the_end_of_what_its_caller_has_left_is_recorded(node: Node) -> None:
    async with used(node) as box:
        with anyio.move_on_after(0.02):
            await box.run("sleep 0.2; echo done", "c1")
        assert (await _ended(box, "c1")).result["exit_code"] == 0


async def test_the_end_of_what_ran_over_a_restart_is_recorded(node: Node) -> None:
    async with node.host.running():
        asked = request()
        async with node.edge() as edge, node.client(edge) as client:
            await edge.create(asked)
            body = {"shell": "sleep 0.1; echo done", "command_id": "c1"}
            await client.post(f"/v1/sandboxes/{asked.id}/commands", json=body)
        async with node.edge() as edge, node.client(edge) as client:
            box = Used(client, edge, asked.id)
            await box.run("true", "c2")
            assert (await _ended(box, "c1")).result["exit_code"] == 0


async def _ended(box: Used, command: str) -> Recorded:
    with anyio.fail_after(20):
        while True:
            for entry in await box.trajectory("?op=command"):
                if entry.id == command and entry.ended_at is not None:
                    return entry
            await anyio.sleep(0.01)


async def test_what_could_not_be_started_may_be_tried_again(node: Node) -> None:
    async with used(node) as box:
        body = {"argv": ["/tmp/tool"], "command_id": "c1"}
        missing = await box.client.post(f"{box.place}/commands/run", json=body)
        assert missing.status_code == 404
        await box.run("echo there > /tmp/there", "c2")
        body["argv"] = ["echo", "now"]
        assert out(await box.client.post(f"{box.place}/commands/run", json=body)) == b"now\n"
        first, second = [e for e in await box.trajectory("?op=command") if e.id == "c1"]
        assert (first.outcome, second.outcome) == ("not_found", "ok")


async def test_one_begun_that_aether_never_saw_is_started(node: Node) -> None:
    async with used(node) as box:
        owner = await box.edge.owner(box.id)
        recording = await box.edge.recordings.of(owner)
        await box.run("echo x >> /tmp/f", "c1")
        place = recording.index.find("command", "c1")
        assert place is not None
        _forget(node, box.id)
        recording.index._places["cc1"] = place._replace(ended_at=0)
        await box.run("echo x >> /tmp/f", "c1")
        assert await box.read("/tmp/f") == b"x\nx\n"


async def test_operations_are_on_record(node: Node) -> None:
    async with used(node) as box:
        await box.write("/tmp/a", b"12345", "k1")
        await box.post("files/move", path="/tmp/a", to="/tmp/b")
        await box.client.get(f"{box.place}/files/list?path=/tmp")
        missing = await box.client.delete(f"{box.place}/files?path=/tmp/none", headers=ME)
        assert missing.status_code == 404
        assert await box.read("/tmp/b") == b"12345"
        entries = (await box.trajectory())[1:]
        assert [entry.op for entry in entries] == [
            "file.write",
            "file.move",
            "file.list",
            "file.remove",
            "file.read",
        ]
        write, move, _, remove, fetched = entries
        assert write.id == "k1"
        assert write.args["body"]["size_bytes"] == 5
        assert write.result["size_bytes"] == 5
        assert move.args == {"path": "/tmp/a", "to": "/tmp/b"}
        assert (remove.outcome, remove.caller) == ("not_found", "me")
        assert (fetched.outcome, fetched.result) == ("ok", {"size_bytes": 5})
        assert [entry.seq for entry in entries] == [2, 3, 4, 5, 6]


async def test_a_repeat_of_an_operation_is_answered_from_the_record(node: Node) -> None:
    async with used(node) as box:
        await box.write("/tmp/a", b"1", "k1")
        moved = await box.post("files/move", key="k2", path="/tmp/a", to="/tmp/b")
        again = await box.post("files/move", key="k2", path="/tmp/a", to="/tmp/b")
        assert (moved.status_code, again.status_code) == (200, 200)
        assert again.json() == moved.json()
        assert again.headers["x-recorded"] == "true"
        other = await box.post("files/move", key="k2", path="/tmp/b", to="/tmp/c")
        assert other.status_code == 409
        assert await box.read("/tmp/b") == b"1"


async def test_a_repeated_upload_is_compared(node: Node) -> None:
    async with used(node) as box:
        await box.write("/tmp/a", b"1", "k1", append="true")
        await box.write("/tmp/a", b"1", "k1", append="true")
        assert await box.read("/tmp/a") == b"1"
        assert (await box.write("/tmp/a", b"2", "k1", append="true")).status_code == 409


async def test_what_was_refused_may_be_tried_again_under_its_key(node: Node) -> None:
    async with used(node) as box:
        assert (
            await box.post("files/move", key="k", path="/tmp/a", to="/tmp/b")
        ).status_code == 404
        await box.write("/tmp/a", b"1", "k1")
        assert (
            await box.post("files/move", key="k", path="/tmp/a", to="/tmp/b")
        ).status_code == 200


async def test_repeats_at_once_are_done_once(node: Node) -> None:
    async with used(node) as box:
        await box.write("/tmp/a", b"", "k0")

        async def append() -> None:
            assert (await box.write("/tmp/a", b"x", "k1", append="true")).status_code == 200

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(append)
        assert await box.read("/tmp/a") == b"x"


async def test_those_without_an_id_are_never_the_same(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def later(_purpose: str, work: Callable[..., None], *args: object) -> None:
        await anyio.lowlevel.checkpoint()  # others begin meanwhile
        work(*args)

    monkeypatch.setattr(appending, "SMALL_BYTES", 0)
    monkeypatch.setattr(appending, "in_thread", later)
    async with used(node) as box:
        recording = await box.edge.recordings.of(await box.edge.owner(box.id))
        before = recording.index.last
        seqs: list[int] = []

        async def begin() -> None:
            seqs.append(await recording.begin("stop"))

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(begin)
        assert sorted(seqs) == [before + n for n in range(1, 7)]


async def test_what_was_interrupted_is_not_done_again_unless_it_may_be(node: Node) -> None:
    async with used(node) as box:
        await box.write("/tmp/a", b"1", "k1")
        await box.post("files/move", key="k2", path="/tmp/a", to="/tmp/b")
        recording = await box.edge.recordings.of(await box.edge.owner(box.id))
        for name in ("kk1", "kk2"):
            place = recording.index._places[name]
            recording.index._places[name] = place._replace(ended_at=0)
        unknown = await box.post("files/move", key="k2", path="/tmp/a", to="/tmp/b")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (504, "interrupted")
        assert (await box.write("/tmp/a", b"1", "k1")).status_code == 200


async def test_the_record_is_there_when_the_sandbox_is_over(node: Node) -> None:
    async with used(node) as box:
        await box.run("echo hi", "c1")
        await box.client.delete(box.place, headers=ME)
        entries = await box.trajectory()
        assert [entry.op for entry in entries] == ["create", "command", "stop", "over"]
        stop, over = entries[2:]
        assert (stop.caller, stop.outcome) == ("me", "ok")
        assert over.result == {"state": "stopped", "reason": "requested"}
        assert (await box.client.get("/v1/sandboxes/n0de-none/trajectory")).status_code in {
            400,
            404,
        }


async def test_input_that_is_sent_again_is_taken_once(node: Node) -> None:
    async with used(node) as box:
        body = {"argv": ["cat"], "stdin": "pipe", "command_id": "c1"}
        await box.client.post(f"{box.place}/commands", json=body)
        stdin = f"{box.place}/commands/c1/stdin"

        async def feed(data: bytes, query: str) -> int:
            return (await box.client.post(f"{stdin}?{query}", content=data)).status_code

        assert await feed(b"abc", "offset=0") == 204
        assert await feed(b"abcd", "offset=0") == 204
        assert await feed(b"x", "offset=9") == 409
        assert await feed(b"de", "offset=3&eof=1") == 204
        result = await box.client.get(f"{box.place}/commands/c1/result")
        assert out(result) == b"abcde"
        assert await feed(b"de", "offset=3&eof=1") == 204
        assert await feed(b"def", "offset=3&eof=1") == 409


async def test_beyond_its_size_outputs_are_left_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.edge.recording.MAX_BYTES", 300)
    async with used(node) as box:
        await box.run("echo hi", "c1")
        await box.run("echo ho", "c2")
        entry = (await box.trajectory("?op=command"))[1]
        assert (entry.id, entry.outcome) == ("c2", "ok")
        assert "left_out" in entry.args
        assert "left_out" in entry.result
        assert entry.stdout is None


async def test_of_what_has_no_id_there_is_an_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with used(node) as box:

        async def warnings() -> list[str]:
            view: dict[str, list[str]] = (await box.client.get(box.place)).json()
            return view["warnings"]

        before = await warnings()
        await box.post("files/mkdir", path="/tmp/a")
        monkeypatch.setattr("dsec.edge.recording.FULL_BYTES", 300)
        await box.post("files/mkdir", path="/tmp/b")
        await box.post("files/mkdir", "k1", path="/tmp/c")
        await box.run("ls /tmp", "c1")
        told = [entry.args.get("path") for entry in await box.trajectory("?op=file.mkdir")]
        assert told == ["/tmp/a", "/tmp/c"]
        assert [entry.id for entry in await box.trajectory("?op=command")] == ["c1"]
        (told_of,) = [warning for warning in await warnings() if warning not in before]
        assert "trajectory is full" in told_of


async def test_a_full_disk_stops_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async with used(node) as box:
        await box.run("echo hi > /tmp/a", "c1")
        with monkeypatch.context() as patched:
            patched.setattr("dsec.trajectory.writer.append", full)
            assert out(await box.run("cat /tmp/a", "c2")) == b"hi\n"
            removed = await box.client.delete(
                f"{box.place}/files?path=/tmp/a", headers={"Idempotency-Key": "k"}
            )
            assert removed.status_code == 200
        assert [entry.op for entry in await box.trajectory()] == ["create", "command"]


async def test_the_file_is_the_sandboxes_own(node: Node) -> None:
    async with used(node) as box:
        owner = await box.edge.owner(box.id)
        assert [entry.op for entry in read(owner.record.path / "trajectory")] == ["create"]


async def test_a_recording_is_not_made_twice_while_somebody_is_at_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was put aside to make room has numbers of its own to give as long as it is used."""
    monkeypatch.setattr("dsec.edge.recording.MAX_IDS", 0)
    async with used(node) as box:
        recordings, owner = box.edge.recordings, await box.edge.owner(box.id)
        known = await recordings.of(owner)
        seq = await known.begin("file.move", ident="k")
        await known.end(seq, "ok")
        other = request()
        await box.edge.create(other)
        await recordings.of(await box.edge.owner(other.id))
        assert box.id not in recordings._known
        assert await recordings.of(owner) is known
        seen = weakref.ref(known)
        await recordings.of(await box.edge.owner(other.id))
        recordings._make_room()
        del known
        gc.collect()
        assert seen() is None
        assert (await recordings.of(owner)).index.find("file.move", "k") is not None
