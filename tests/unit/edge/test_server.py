from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from dsec.base.errors import InvalidRequest
from dsec.edge.server import EDGE_ROUTES, _port
from dsec.kit.openapi import describe
from tests.unit.edge.node import Node, request


@asynccontextmanager
async def sandbox(node: Node) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        async with node.client(edge) as client:
            yield client, f"/v1/sandboxes/{asked.id}"


def lines(answer: httpx.Response) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in answer.text.splitlines()]


async def test_run(node: Node) -> None:
    async with sandbox(node) as (client, place):
        answer = await client.post(f"{place}/commands/run", json={"argv": ["echo", "hi"]})
        assert answer.status_code == 200
        assert answer.json()["exit_code"] == 0
        assert base64.b64decode(answer.json()["stdout"]["head"]) == b"hi\n"


@pytest.mark.parametrize("text", ["²", "0", "65536", "-1", "٣", "1" * 5000, ""])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        _port(text)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "either argv or shell"),
        ({"argv": ["a"], "shell": "b"}, "either argv or shell"),
        ({"argv": []}, "names no program"),
        ({"argv": ["a"], "command_id": "../x"}, "command id"),
        ({"argv": ["a"], "timeout_s": -1}, "timeout_s"),
        ({"argv": ["a"], "nonsense": 1}, "nonsense"),
    ],
)
async def test_a_bad_command_is_refused_in_words(
    node: Node, body: dict[str, object], says: str
) -> None:
    async with sandbox(node) as (client, place):
        answer = await client.post(f"{place}/commands/run", json=body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


async def test_events_come_in_order_and_can_be_had_again(node: Node) -> None:
    async with sandbox(node) as (client, place):
        body = {"shell": "echo a; echo b >&2", "command_id": "c1"}
        events = lines(await client.post(f"{place}/commands/stream", json=body))
        assert [event["type"] for event in events][0::3] == ["started", "exited"]
        again = lines(await client.get(f"{place}/commands/c1/events?stdout_from=1&stderr_from=2"))
        assert again[1] == {"type": "output", "stream": "stdout", "offset": 1, "data": "Cg=="}
        assert again[-1]["type"] == "exited"
        now = lines(await client.get(f"{place}/commands/c1/events"))
        assert [event["type"] for event in now] == ["started", "exited"]


async def test_a_command_by_its_id(node: Node) -> None:
    async with sandbox(node) as (client, place):
        body = {"argv": ["cat"], "stdin": "pipe", "command_id": "c1"}
        assert (await client.post(f"{place}/commands", json=body)).status_code == 201
        one = f"{place}/commands/c1"
        assert (await client.get(one)).json()["running"]
        assert (await client.post(f"{one}/stdin", content=b"to ")).status_code == 204
        assert (await client.post(f"{one}/stdin?eof=1", content=b"it")).status_code == 204
        result = (await client.get(f"{one}/result")).json()
        assert base64.b64decode(result["stdout"]["head"]) == b"to it"
        assert [c["command_id"] for c in (await client.get(f"{place}/commands")).json()] == ["c1"]
        assert (await client.delete(one)).json()["exit_code"] == 0
        assert (await client.post(f"{one}/signal?signal=TERM")).status_code == 404
        for wrong in ("NONE", "²", "0", "65"):
            assert (await client.post(f"{one}/signal?signal={wrong}")).status_code == 400
        assert (await client.post(f"{one}/resize?rows=0&cols=1")).status_code == 400
        assert (await client.get(f"{place}/commands/none")).status_code == 404


async def test_files(node: Node) -> None:
    async with sandbox(node) as (client, place):
        files, data = f"{place}/files", bytes(range(256)) * 4096
        at = {"path": "/tmp/odd %name"}
        put = await client.put(files, params={**at, "mode": "0640"}, content=data)
        assert (put.status_code, put.json()["mode"]) == (200, 0o640)
        got = await client.get(files, params=at)
        assert got.content == data
        assert (got.headers["x-file-mode"], got.headers["x-file-size"]) == ("640", str(len(data)))
        assert (await client.get(f"{files}/stat", params=at)).json()["path"] == at["path"]
        moved = await client.post(f"{files}/move", params={**at, "to": "/tmp/b"})
        assert moved.json()["path"] == "/tmp/b"
        assert (await client.post(f"{files}/mkdir", params={"path": "/tmp/d"})).status_code == 200
        listed = (await client.get(f"{files}/list", params={"path": "/tmp"})).json()
        assert sorted(entry["path"].rpartition("/")[2] for entry in listed) == ["b", "d"]
        gone = await client.delete(files, params={"path": "/tmp/d", "recursive": "1"})
        assert gone.json() == {"removed": 1}
        assert (await client.get(files, params=at)).status_code == 404


async def test_a_name_that_is_not_text(node: Node) -> None:
    async with sandbox(node) as (client, place):
        put = await client.put(f"{place}/files?path=/tmp/%FF", content=b"x")
        assert base64.b64decode(put.json()["path_b64"]) == b"/tmp/\xff"
        assert (await client.get(f"{place}/files?path=/tmp/%FF")).content == b"x"


@pytest.mark.parametrize(
    "query", ["", "path=", "path=%00", "path=/a&mode=9", "path=/a&sha256=x", "path=/a&odd=1"]
)
async def test_a_bad_query_is_refused(node: Node, query: str) -> None:
    async with sandbox(node) as (client, place):
        answer = await client.put(f"{place}/files?{query}", content=b"")
        assert answer.status_code == 400


async def test_trees(node: Node) -> None:
    async with sandbox(node) as (client, place):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            info = tarfile.TarInfo("a/b")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        await client.post(f"{place}/files/mkdir", params={"path": "/tmp/t"})
        put = await client.put(f"{place}/tree?path=/tmp/t", content=packed.getvalue())
        assert put.status_code == 200, put.text
        assert (await client.get(f"{place}/files?path=/tmp/t/a/b")).content == b"abc"
        got = await client.get(f"{place}/tree?path=/tmp/t")
        with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
            assert any(name.endswith("a/b") for name in tar.getnames())


async def test_sessions(node: Node) -> None:
    async with sandbox(node) as (client, place):
        opened = await client.post(f"{place}/sessions", json={"session_id": "s1"})
        assert opened.status_code == 201

        async def run(line: str) -> dict[str, dict[str, str]]:
            body = {"shell": line, "session": "s1"}
            ended: dict[str, dict[str, str]] = (
                await client.post(f"{place}/commands/run", json=body)
            ).json()
            return ended

        await run("cd /tmp")
        answer = await run("pwd")
        assert base64.b64decode(answer["stdout"]["head"]) == b"/tmp\n"
        assert len((await client.get(f"{place}/sessions")).json()) == 1
        assert (await client.delete(f"{place}/sessions/s1")).status_code == 204
        assert (await client.get(f"{place}/sessions")).json() == []


async def test_the_sandbox_itself(node: Node) -> None:
    async with sandbox(node) as (client, place):
        assert (await client.get(place)).json()["state"] == "running"
        assert (await client.get(f"{place}/usage")).json()["memory_limit_bytes"] == 2048 << 20
        assert len((await client.get(f"{place}/processes")).json()) == 1
        assert (await client.delete(place)).json()["state"] == "stopped"
        assert (await client.delete(place)).json()["state"] == "stopped"
        gone = await client.get(f"{place}/processes")
        assert gone.status_code == 410
        assert gone.json()["error"]["details"]["reason"] == "requested"
        unknown = await client.get("/v1/sandboxes/sbxn0de0000000000000000")
        assert unknown.status_code == 404
        assert (await client.get("/v1/sandboxes/x")).status_code == 404


async def test_the_control_planes_calls(node: Node) -> None:
    async with node.host.running(), node.edge() as edge, node.client(edge) as client:
        asked = request(labels={"a": "1"})
        body = msgspec.json.encode(asked)
        made = await client.post("/edge/v1/sandboxes", content=body)
        assert made.json()["id"] == asked.id
        listed = await client.post("/edge/v1/sandboxes:list", json={"labels": {"a": "1"}})
        assert [view["id"] for view in listed.json()] == [asked.id]
        assert (await client.get("/edge/v1/node")).json()["running"] == 1
        assert (await client.get(f"/edge/v1/sandboxes/{asked.id}")).status_code == 200
        loaded = await client.post("/edge/v1/images/import?name=new", content=b"12345")
        assert lines(loaded)[-1]["image"]["size_bytes"] == 5  # type: ignore[index]
        assert len((await client.get("/edge/v1/images")).json()) == 2
        assert (await client.delete("/edge/v1/images?name=new")).status_code == 204
        assert (await client.delete("/edge/v1/images?name=none")).status_code == 404
        assert (await client.delete(f"/edge/v1/sandboxes/{asked.id}")).json()["state"] == "stopped"


def test_the_public_table_can_be_described() -> None:
    description = describe(EDGE_ROUTES, "edge", "1")
    paths = description["paths"]
    assert isinstance(paths, dict)
    assert set(paths["/v1/sandboxes/{id}/files"]) == {"get", "put", "delete"}
