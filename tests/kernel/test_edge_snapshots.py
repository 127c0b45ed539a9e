"""Packing, restoring and forking real containers."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import msgspec
import pytest

from dsec.base.ids import NodeId, mint_sandbox_id
from dsec.wire.edge_v1 import PRINCIPAL_HEADER
from dsec.wire.sandbox import Limits
from tests.kernel.test_edge import NODE, Edge, aether, anyio_backend, edge, store, text

__all__ = ["aether", "anyio_backend", "edge", "store"]
pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]

HOME = "/root"
HISTORY = f"{HOME}/.bash_history"
ME = {PRINCIPAL_HEADER: "me"}
OWN_DISK = Limits(memory_mb=64, cpu_cores=1, pids=32, disk_mb=64)


async def write(edge: Edge, sandbox: str, path: str, data: bytes) -> None:
    answer = await edge.http.put(f"/v1/sandboxes/{sandbox}/files?path={path}", content=data)
    assert answer.status_code == 200, answer.text


async def read(edge: Edge, sandbox: str, path: str) -> bytes:
    answer = await edge.http.get(f"/v1/sandboxes/{sandbox}/files?path={path}")
    assert answer.status_code == 200, answer.text
    return answer.content


async def has(edge: Edge, sandbox: str, path: str) -> bool:
    answer = await edge.http.get(f"/v1/sandboxes/{sandbox}/files/stat?path={path}")
    return answer.status_code == 200


async def pack(edge: Edge, sandbox: str, name: str, **more: Any) -> dict[str, Any]:
    answer = await edge.http.post(
        f"/v1/sandboxes/{sandbox}/pack", json={"name": name, **more}, headers=ME
    )
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


async def fork(edge: Edge, sandbox: str, **wanted: Any) -> list[dict[str, Any]]:
    answer = await edge.http.post(f"/v1/sandboxes/{sandbox}/fork", json=wanted, headers=ME)
    assert answer.status_code == 200, answer.text
    items = [msgspec.json.decode(line) for line in answer.text.splitlines()]
    found = [item for item in items if "index" in item]
    assert not [item for item in found if "error" in item], found
    return [item["sandbox"] for item in sorted(found, key=lambda item: item["index"])]


async def remove(edge: Edge, *names: str) -> None:
    for name in names:
        answer = await edge.http.delete(f"/edge/v1/snapshots?project=p&name={name}")
        assert answer.status_code == 204, answer.text


async def layers(edge: Edge) -> int:
    return len(list((edge.home / "images/layers").iterdir()))


async def down_to(edge: Edge, count: int) -> None:
    with anyio.fail_after(30):
        while await layers(edge) > count:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.01)


@pytest.mark.parametrize("limits", [None, OWN_DISK], ids=["shared-disk", "own-disk"])
async def test_a_restored_sandbox_has_what_was_written(edge: Edge, limits: Limits | None) -> None:
    before = await layers(edge)
    spec: dict[str, Any] = {"limits": limits} if limits else {}
    sandbox = await edge.create(**spec)
    await write(edge, sandbox, "/root/kept", b"k" * 100_000)
    await write(edge, sandbox, "/etc/hosts", b"of my own\n")
    await edge.http.delete(f"/v1/sandboxes/{sandbox}/files?path=/etc/group")
    diff = (await edge.http.get(f"/v1/sandboxes/{sandbox}/diff")).json()
    changes = {entry["path"]: entry["change"] for entry in diff}
    assert (changes["/root/kept"], changes["/etc/group"]) == ("added", "removed")
    view = await pack(edge, sandbox, "s")
    assert view["image"] == "snapshots/p/s"
    assert 0 < view["frozen_ms"] <= view["duration_ms"]
    await write(edge, sandbox, "/root/later", b"l")
    await edge.stop(sandbox)
    restored = await edge.create(image="snapshots/p/s")
    assert await read(edge, restored, "/root/kept") == b"k" * 100_000
    assert await read(edge, restored, "/etc/hosts") == b"of my own\n"
    assert await read(edge, restored, "/etc/hostname") == f"{restored}\n".encode()
    assert not await has(edge, restored, "/etc/group")
    assert not await has(edge, restored, "/root/later")
    await edge.stop(restored)
    await remove(edge, "s")
    await down_to(edge, before)


async def test_snapshots_stack_and_a_paused_one_stays_paused(edge: Edge) -> None:
    before = await layers(edge)
    sandbox = await edge.create()
    await write(edge, sandbox, "/root/one", b"1")
    await pack(edge, sandbox, "one")
    await edge.stop(sandbox)
    second = await edge.create(image="snapshots/p/one")
    await write(edge, second, "/root/two", b"2")
    assert (await edge.http.post(f"/v1/sandboxes/{second}/pause")).status_code == 200
    assert (await pack(edge, second, "two"))["depth"] == 2
    assert (await edge.view(second))["state"] == "paused"
    await edge.stop(second)
    third = await edge.create(image="snapshots/p/two")
    assert await read(edge, third, "/root/one") == b"1"
    assert await read(edge, third, "/root/two") == b"2"
    await edge.stop(third)
    await remove(edge, "one", "two")
    await down_to(edge, before)


async def test_forks_share_what_the_parent_wrote_and_leave_nothing(edge: Edge) -> None:
    before = await layers(edge)
    sandbox = await edge.create()
    await write(edge, sandbox, "/root/file", b"parent")
    children = await fork(edge, sandbox, count=3, key="k")
    await write(edge, sandbox, "/root/file", b"parent, later")
    machines = {await read(edge, sandbox, "/etc/machine-id")}
    for child in children:
        name = child["id"]
        assert child["parent"] == sandbox
        assert await read(edge, name, "/root/file") == b"parent"
        assert await read(edge, name, "/etc/hostname") == f"{name}\n".encode()
        assert name in (await read(edge, name, "/etc/hosts")).decode()
        machines.add(await read(edge, name, "/etc/machine-id"))
        await write(edge, name, "/root/file", name.encode())
    assert len(machines) == 4
    assert [await read(edge, c["id"], "/root/file") for c in children] == [
        c["id"].encode() for c in children
    ]
    assert [c["id"] for c in await fork(edge, sandbox, count=3, key="k")] == [
        c["id"] for c in children
    ]
    assert await layers(edge) == before + 1
    for child in children:
        await edge.stop(child["id"])
    await down_to(edge, before)


async def test_children_and_the_layer_live_through_a_kill_of_the_edge(edge: Edge) -> None:
    before = await layers(edge)
    sandbox = await edge.create()
    await write(edge, sandbox, "/root/file", b"parent")
    (child,) = await fork(edge, sandbox)
    edge.kill()
    await edge.start()
    assert await read(edge, child["id"], "/root/file") == b"parent"
    (grandchild,) = await fork(edge, child["id"])
    assert await read(edge, grandchild["id"], "/root/file") == b"parent"
    for name in (sandbox, child["id"], grandchild["id"]):
        await edge.stop(name)
    await down_to(edge, before)


async def test_killed_amid_forks_nothing_is_left_and_the_key_goes_on(edge: Edge) -> None:
    before = await layers(edge)
    sandbox = await edge.create()
    await write(edge, sandbox, "/root/file", b"parent")

    async def begin() -> None:
        with contextlib.suppress(Exception):  # the edge is killed under it
            await fork(edge, sandbox, count=12, key="k")

    async with anyio.create_task_group() as group:
        group.start_soon(begin)
        with anyio.fail_after(30):
            while len(await edge.listed()) < 4:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.001)
        edge.kill()
    await edge.start()
    children = await fork(edge, sandbox, count=12, key="k")
    assert len({child["id"] for child in children}) == 12
    for child in children:
        assert await read(edge, child["id"], "/root/file") == b"parent"
        await edge.stop(child["id"])
    await down_to(edge, before)


async def test_what_was_packed_with_residue_is_the_packers_alone(edge: Edge) -> None:
    sandbox = await edge.create()
    await write(edge, sandbox, HISTORY, b"secret")
    await pack(edge, sandbox, "all", clean=False)
    assert (await pack(edge, sandbox, "clean"))["left_out"] >= 1
    clean = await edge.create(image="snapshots/p/clean")
    assert not await has(edge, clean, HISTORY)
    for principal, status in (("", 403), ("you", 403), ("me", 200)):
        body = {
            "id": mint_sandbox_id(NodeId(NODE)),
            "project": "p",
            "principal": principal,
            "spec": {"image": "snapshots/p/all", "limits": {"memory_mb": 64}},
        }
        answer = await edge.http.post("/edge/v1/sandboxes", json=body)
        assert answer.status_code == status, answer.text
        if status == 200:
            assert await read(edge, body["id"], HISTORY) == b"secret"  # type: ignore[arg-type]
            await edge.stop(body["id"])  # type: ignore[arg-type]
    await edge.stop(clean)
    await edge.stop(sandbox)
    await remove(edge, "all", "clean")


async def test_the_trajectory_goes_on_in_children(edge: Edge) -> None:
    sandbox = await edge.create()
    await write(edge, sandbox, "/root/file", b"1")
    await edge.run(sandbox, "echo", "hello", command_id="c1")
    (child,) = await fork(edge, sandbox)
    answer = await edge.http.get(f"/v1/sandboxes/{child['id']}/trajectory")
    entries = [msgspec.json.decode(line) for line in answer.text.splitlines()]
    inherited = [entry["op"] for entry in entries if entry.get("inherited")]
    assert inherited[:3] == ["create", "file.write", "command"]
    assert text(next(e for e in entries if e["op"] == "command")["stdout"]) == "hello\n"
