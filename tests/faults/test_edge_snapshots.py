"""Kill the edge after every journal write of pack, restore and fork: what is left is whole or gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import NotFound
from dsec.base.states import SandboxState
from dsec.edge.histories import TRAJECTORY
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.service import EdgeService
from dsec.trajectory.reader import read
from dsec.wire.edge_v1 import CreateOnEdge, ListFilter
from dsec.wire.sandbox import Fork, Pack
from tests.faults.killing import Killed, only_killed, without_threads
from tests.unit.edge.node import request
from tests.unit.edge.packable import PackableNode, nothing
from tests.unit.edge.test_packing import happened, restored

STEPS = 2
Act = Callable[[EdgeService], Awaitable[object]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackableNode:
    without_threads(
        monkeypatch, "service", "lifecycle.owner", "sweep", "packing", "forking", "restoring"
    )
    return PackableNode(tmp_path)


async def killed_at(node: PackableNode, act: Act, kill_at: int) -> tuple[int, bool]:
    """Act on an edge that is killed at its n-th journal write, or at a step of packing after them.

    Returns how many writes there were, and whether the caller heard that it was done.
    """
    writes, told, armed = 0, False, False

    def after_write(_number: int) -> None:
        nonlocal writes
        if not armed:
            return
        writes += 1
        if writes == kill_at:
            raise Killed

    async def step() -> None:
        after_write(0)

    fake = node.images.fake
    fake.on_look = fake.on_take = fake.on_layer = step
    try:
        async with node.edge(after_write=after_write, backends=[node.backend()]) as edge:
            armed = True
            await act(edge)
            told = True
            armed = False
    except BaseException as exc:
        if not only_killed(exc):
            raise
    finally:
        fake.on_look = fake.on_take = fake.on_layer = nothing
    return writes, told


async def parent_on(node: PackableNode) -> str:
    """A sandbox with something written and something done, left by an edge that went down."""
    async with node.edge(backends=[node.backend()]) as edge:
        parent = (await edge.create(request())).id
        node.write(parent, file=b"1")
        await happened(edge, parent, STEPS)
    return parent


async def forked(edge: EdgeService, parent: str) -> list[str]:
    async with edge.fork(parent, Fork(count=2, key="k"), "me") as events:
        return [item.sandbox.id async for item in events if item.sandbox]


async def stop_all(edge: EdgeService) -> None:
    for view in await edge.list_sandboxes(ListFilter(states=["running"])):
        await edge.stop(view.id)


def leftovers(node: PackableNode) -> dict[str, object]:
    journal, state = Journal(node.root / "state"), node.root / "state"
    return {
        "directories": list(journal.sandboxes.iterdir()),
        "trash": list(journal.trash.iterdir()),
        "histories": list((state / "histories").rglob("*")),
        "sandboxes": list(node.host.sandboxes),
        "layers": list(node.images.fake.layers),
        "pins": dict(node.images.pins),
    }


NOTHING: dict[str, object] = {
    "directories": [],
    "trash": [],
    "histories": [],
    "sandboxes": [],
    "layers": [],
    "pins": {},
}


async def nothing_left(node: PackableNode, edge: EdgeService) -> None:
    await stop_all(edge)
    for name in [view.name for view in await edge.snapshots("p")]:
        await edge.remove_snapshot("p", name)
    edge.layers_may_go()
    await anyio.wait_all_tasks_blocked()
    assert leftovers(node) == NOTHING


async def test_packing(node: PackableNode) -> None:
    kill_at, told, outcomes = 1, False, set()
    while not told:
        async with node.host.running():
            parent = await parent_on(node)

            async def pack(edge: EdgeService, of: str = parent) -> object:
                return await edge.pack(of, Pack(name="s"), "me")

            _, told = await killed_at(node, pack, kill_at)
            async with node.edge(backends=[node.backend()]) as edge:
                await anyio.wait_all_tasks_blocked()
                assert (await edge.get(parent)).state is SandboxState.RUNNING
                known = await edge.snapshots("p")
                outcomes.add(bool(known))
                assert known or not told, f"killed after write {kill_at}"
                if known:
                    await _check_restored(node, edge)
                await nothing_left(node, edge)
        kill_at += 1
    assert outcomes == {True, False}


async def _check_restored(node: PackableNode, edge: EdgeService) -> None:
    child = (await edge.create(restored("s", "me"))).id
    file = node.root / "state" / "sandboxes" / child / TRAJECTORY
    assert sum(entry.inherited for entry in read(file)) == STEPS


async def test_restoring(node: PackableNode) -> None:
    async with node.host.running():
        parent = await parent_on(node)
        async with node.edge(backends=[node.backend()]) as edge:
            await edge.pack(parent, Pack(name="s"), "me")
        kill_at, told = 1, False
        while not told:
            asked = restored("s", "me")

            async def restore(edge: EdgeService, wanted: CreateOnEdge = asked) -> object:
                return await edge.create(wanted)

            _, told = await killed_at(node, restore, kill_at)
            async with node.edge(backends=[node.backend()]) as edge:
                assert (await edge.create(asked)).state is SandboxState.RUNNING
                file = node.root / "state" / "sandboxes" / asked.id / TRAJECTORY
                assert sum(entry.inherited for entry in read(file)) == STEPS
                await edge.stop(asked.id)
            kill_at += 1
        assert kill_at > 5
        async with node.edge(backends=[node.backend()]) as edge:
            await nothing_left(node, edge)


async def test_forking(node: PackableNode) -> None:
    kill_at, told = 1, False
    while not told:
        async with node.host.running():
            parent = await parent_on(node)

            async def fork(edge: EdgeService, of: str = parent) -> object:
                return await forked(edge, of)

            _, told = await killed_at(node, fork, kill_at)
            async with node.edge(backends=[node.backend()]) as edge:
                await anyio.wait_all_tasks_blocked()
                assert (await edge.get(parent)).state is SandboxState.RUNNING
                views = await edge.list_sandboxes(ListFilter())
                before = {view.id for view in views if view.parent == parent}
                children = await forked(edge, parent)
                assert len(children) == 2
                assert before <= set(children), f"killed after write {kill_at}"
                for child in children:
                    record = (await edge.owner(child)).record
                    assert node.images.fake.layers[record.environment.layers[-1]] == {"file": b"1"}
                    assert sum(e.inherited for e in read(record.path / TRAJECTORY)) == STEPS
                await nothing_left(node, edge)
        kill_at += 1
    assert kill_at > 8


async def test_killed_while_a_fork_is_packed_its_layer_goes_at_the_next_start(
    node: PackableNode,
) -> None:
    async with node.host.running():
        parent = await parent_on(node)
        node.images.fake.layers["sha256:" + "9" * 64] = {"left": b"by a fork that was cut off"}
        async with node.edge(backends=[node.backend()]) as edge:
            await anyio.wait_all_tasks_blocked()
            assert node.images.fake.layers == {}
            with pytest.raises(NotFound):
                await edge.remove_snapshot("p", "s")
            await edge.stop(parent)
