"""Forks: what children begin with, keys, who leaves, what fails, and what is left of the layer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from dsec.base.errors import DeadlineExceeded, NotFound, SandboxGone, StorageFull, Unsupported
from dsec.base.states import SandboxState
from dsec.edge import forking
from dsec.edge.admission import AdmissionLimits
from dsec.edge.forking import AT_ONCE
from dsec.edge.histories import TRAJECTORY
from dsec.edge.service import EdgeService
from dsec.trajectory.reader import read
from dsec.wire.edge_v1 import ListFilter
from dsec.wire.public_v1 import BatchItem
from dsec.wire.sandbox import Fork, Limits, Pack, SandboxView
from tests.unit.edge.node import Node, request
from tests.unit.edge.packable import PackableNode
from tests.unit.edge.test_packing import happened, histories, made, until

S = SandboxState


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def node(tmp_path: Path) -> PackableNode:
    return PackableNode(tmp_path)


async def items(edge: EdgeService, sandbox: str, wanted: Fork) -> list[BatchItem]:
    async with edge.fork(sandbox, wanted, "me") as events:
        return sorted([item async for item in events], key=lambda item: item.index)


async def forked(edge: EdgeService, sandbox: str, wanted: Fork) -> list[SandboxView]:
    found = [item.sandbox for item in await items(edge, sandbox, wanted)]
    assert all(found)
    return [view for view in found if view is not None]


async def quiet(node: PackableNode) -> None:
    """Nothing of a fork is held any more."""
    await until(lambda: not any(holder.startswith("fork-") for holder in node.images.pins))


async def test_children_stand_on_what_the_parent_has_written(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        limits = Limits(memory_mb=64, pids=33)
        parent = await made(edge, hostname="old", limits=limits, labels={"a": "1"}, job="j")
        node.write(parent, file=b"1")
        await happened(edge, parent, 3)
        children = await forked(edge, parent, Fork(count=3))
        assert len({child.id for child in children} | {parent}) == 4
        for child in children:
            record = (await edge.owner(child.id)).record
            assert (child.parent, child.state, child.limits) == (parent, S.RUNNING, limits)
            assert (child.labels, child.job, child.project) == ({"a": "1"}, "j", "p")
            assert record.spec.hostname is None
            *below, layer = record.environment.layers
            assert below == (await edge.owner(parent)).record.environment.layers
            assert node.images.fake.layers[layer] == {"file": b"1"}
            own = [entry for entry in read(record.path / TRAJECTORY) if entry.inherited]
            assert len(own) == 3


async def test_it_is_packed_once_and_the_parent_goes_on(node: PackableNode) -> None:
    backend, fake = node.backend(), node.images.fake
    async with node.edge(backends=[backend]) as edge:
        parent = await made(edge)
        await forked(edge, parent, Fork(count=20, labels={"b": "2"}))
        assert fake.steps == ["look", "take", "layer"]
        assert ((await edge.get(parent)).state, backend.frozen) == (S.RUNNING, set())
        views = await edge.list_sandboxes(_labelled("b", "2"))
        assert len(views) == 20


async def test_the_layer_goes_with_the_last_child(node: PackableNode) -> None:
    fake = node.images.fake
    async with node.host.running():
        async with node.edge(backends=[node.backend()]) as edge:
            parent = await made(edge)
            node.write(parent, file=b"1")
            one, two = await forked(edge, parent, Fork(count=2))
            await edge.stop(parent)
            await edge.stop(one.id)
            await quiet(node)
            assert len(fake.layers) == 1
        async with node.edge(backends=[node.backend()]) as edge:  # it is known after a restart
            await anyio.wait_all_tasks_blocked()
            assert len(fake.layers) == 1
            await edge.stop(two.id)
            await until(lambda: not fake.layers)
        assert histories(node) == []


async def test_a_fork_of_a_fork_and_of_a_paused_one(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        node.write(parent, one=b"1")
        (child,) = await forked(edge, parent, Fork())
        node.write(child.id, two=b"2")
        await edge.pause(child.id)
        (grandchild,) = await forked(edge, child.id, Fork())
        assert (await edge.get(child.id)).state is S.PAUSED
        layers = (await edge.owner(grandchild.id)).record.environment.layers
        assert [node.images.fake.layers[layer] for layer in layers[-2:]] == [
            {"one": b"1"},
            {"two": b"2"},
        ]
        assert grandchild.parent == child.id


async def test_the_same_key_gives_the_same_children(node: PackableNode) -> None:
    wanted = Fork(count=3, key="k")
    async with node.host.running():
        async with node.edge(backends=[node.backend()]) as edge:
            parent = await made(edge)
            first = [child.id for child in await forked(edge, parent, wanted)]
            again = [child.id for child in await forked(edge, parent, wanted)]
            other = [child.id for child in await forked(edge, parent, Fork(count=3, key="l"))]
            assert first == again
            assert not set(first) & set(other)
            await edge.stop(first[1])
            await edge.stop(parent)
        async with node.edge(backends=[node.backend()]) as edge:
            views = await forked(edge, parent, wanted)
            assert [view.id for view in views] == first
            assert [view.state for view in views] == [S.RUNNING, S.STOPPED, S.RUNNING]
            assert node.images.fake.steps.count("take") == 2


async def test_the_same_key_at_the_same_time(node: PackableNode) -> None:
    found: list[list[str]] = []
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)

        async def one() -> None:
            found.append([v.id for v in await forked(edge, parent, Fork(count=4, key="k"))])

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(one)
        assert found[0] == found[1] == found[2]
        assert node.images.fake.steps.count("take") == 1


async def test_the_rest_of_a_repeat_begins_where_its_siblings_began(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        node.write(parent, file=b"then")
        await happened(edge, parent, 2)
        (one,) = await forked(edge, parent, Fork(count=1, key="k"))
        node.write(parent, file=b"now")
        await edge.stop(parent)
        both = await forked(edge, parent, Fork(count=2, key="k"))
        assert both[0].id == one.id
        record = (await edge.owner(both[1].id)).record
        assert node.images.fake.layers[record.environment.layers[-1]] == {"file": b"then"}
        assert record.inherited == 2
        assert record.parent == parent


async def test_the_rest_of_a_repeat_is_refused_when_the_siblings_are_over(
    node: PackableNode,
) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        (one,) = await forked(edge, parent, Fork(count=1, key="k"))
        await edge.stop(one.id)
        node.write(parent, file=b"now")
        first, second = await items(edge, parent, Fork(count=2, key="k"))
        assert first.sandbox is not None
        assert first.sandbox.id == one.id
        assert second.error is not None
        assert second.error.code == "conflict"
        assert node.images.fake.steps.count("take") == 1
        assert {view.id for view in await edge.list_sandboxes(_labelled())} == {parent, one.id}


async def test_a_key_is_one_request_s(node: PackableNode) -> None:
    async with node.host.running(), node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        async with node.client(edge) as client:
            place = f"/v1/sandboxes/{parent}"
            asked = {"count": 2, "key": "k", "labels": {"a": "b"}}
            first = await client.post(f"{place}/fork", json=asked)
            again = await client.post(f"{place}/fork", json=asked)
            more = await client.post(f"{place}/fork", json={**asked, "count": 3})
            other = await client.post(f"{place}/fork", json={**asked, "labels": {}})
            command = {"shell": "true", "command_id": "k"}
            run = await client.post(f"{place}/commands/run", json=command)
        assert (first.status_code, again.status_code) == (200, 200)
        assert ids(first.content) == ids(again.content)
        assert [reply.status_code for reply in (more, other, run)] == [409] * 3
        assert len(await edge.list_sandboxes(_labelled())) == 3


def ids(answer: bytes) -> set[str]:
    found = [msgspec.json.decode(line) for line in answer.splitlines()]
    return {item["sandbox"]["id"] for item in found if "sandbox" in item}


async def test_each_child_is_admitted_or_refused_for_itself(node: PackableNode) -> None:
    limits = AdmissionLimits(memory_floor_bytes=0, max_sandboxes=3)
    async with node.edge(backends=[node.backend()], limits=limits) as edge:
        parent = await made(edge)
        found = await items(edge, parent, Fork(count=5))
        assert [item.index for item in found] == list(range(5))
        refused = [item.error.code for item in found if item.error]
        assert refused == ["capacity_unavailable"] * 3


async def test_nothing_is_made_of_a_parent_that_is_not_there(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        await edge.stop(parent)
        with pytest.raises(SandboxGone):
            await items(edge, parent, Fork())
        with pytest.raises(NotFound):
            await items(edge, request().id, Fork())
        with pytest.raises(NotFound):
            await items(edge, "nonsense", Fork())


async def test_the_simulation_says_that_it_has_nothing_to_fork(tmp_path: Path) -> None:
    simulated = Node(tmp_path)
    simulated.clock = PackableNode(tmp_path).clock
    async with simulated.edge() as edge:
        parent = await made(edge)
        with pytest.raises(Unsupported, match="nothing to pack"):
            await items(edge, parent, Fork())


@pytest.mark.parametrize("what", ["layer", "history"])
async def test_a_full_disk_makes_no_child_and_leaves_nothing(
    node: PackableNode, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def full() -> None:
        raise StorageFull("the disk is full")

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "layer":
        node.images.fake.on_layer = full
    else:
        monkeypatch.setattr("dsec.edge.forking.copy_history", no_room)
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        await happened(edge, parent, 1)
        with pytest.raises(StorageFull):
            await items(edge, parent, Fork(count=2))
        await quiet(node)
        assert [view.id for view in await edge.list_sandboxes(_labelled())] == [parent]
        assert (await edge.get(parent)).state is S.RUNNING
    assert histories(node) == []


async def test_who_leaves_gives_up_what_has_not_begun(node: PackableNode) -> None:
    fake, packing, go_on = node.images.fake, anyio.Event(), anyio.Event()

    async def wait() -> None:
        packing.set()
        await go_on.wait()

    fake.on_look = wait
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        async with anyio.create_task_group() as group:
            group.start_soon(items, edge, parent, Fork(count=50, key="k"))
            await packing.wait()
            group.cancel_scope.cancel()
        go_on.set()
        await until(lambda: "layer" in fake.steps)
        await quiet(node)
        assert [view.id for view in await edge.list_sandboxes(_labelled())] == [parent]
        await until(lambda: not fake.layers)
        assert len(await forked(edge, parent, Fork(count=50, key="k"))) == 50


async def test_a_stop_of_the_parent_while_it_is_packed(node: PackableNode) -> None:
    fake, packing = node.images.fake, anyio.Event()

    async def wait() -> None:
        packing.set()
        await anyio.sleep_forever()

    fake.on_look = wait
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        failures: list[SandboxGone] = []

        async def fork() -> None:
            try:
                await items(edge, parent, Fork())
            except SandboxGone as exc:
                failures.append(exc)

        async with anyio.create_task_group() as group:
            group.start_soon(fork)
            await packing.wait()
            await edge.stop(parent)
        assert len(failures) == 1


async def test_a_snapshot_of_a_child_has_what_its_parent_left_behind(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        (child,) = await forked(edge, parent, Fork())
        view = await edge.pack(child.id, Pack(name="s"), "me")
        assert (view.sandbox, view.cleaned) == (child.id, False)  # the fork had its residue


def _labelled(key: str = "", value: str = "") -> ListFilter:
    return ListFilter(labels={key: value} if key else {})


async def test_no_more_is_made_than_has_room_for_its_history(
    node: PackableNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        parent = await made(edge)
        await happened(edge, parent, 5)
        size = node.trajectory(parent).stat().st_size
        monkeypatch.setattr("dsec.edge.histories.MAX_COPIES_BYTES", 3 * size)
        with pytest.raises(StorageFull, match="fewer"):
            await items(edge, parent, Fork(count=4))
        assert len(await forked(edge, parent, Fork(count=2))) == 2
        await quiet(node)


async def test_no_child_is_begun_once_the_parent_is_over(node: PackableNode) -> None:
    limits = AdmissionLimits(memory_floor_bytes=0, max_launching=1)
    async with node.edge(backends=[node.backend()], limits=limits) as edge:
        parent = await made(edge)
        gate = node.faults.gates["launch"] = anyio.Event()
        found: list[BatchItem] = []

        async def fork() -> None:
            found.extend(await items(edge, parent, Fork(count=AT_ONCE + 5)))

        async with anyio.create_task_group() as group:
            group.start_soon(fork)
            await until(lambda: len(edge._live) == 1 + AT_ONCE)
            await edge.stop(parent)
            gate.set()
        assert [item.sandbox is not None for item in found] == [True] * AT_ONCE + [False] * 5
        assert {item.error.code for item in found if item.error} == {"sandbox_gone"}


async def test_a_fork_for_a_job_ends_while_its_children_are_looked_for(
    node: PackableNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "JOB_DEADLINE_S", 0.0)
    async with node.edge(backends=[node.backend()]) as edge:
        plain, of_a_job = await made(edge), await made(edge, job="j")
        assert len(await forked(edge, plain, Fork())) == 1
        with pytest.raises(DeadlineExceeded):
            await items(edge, of_a_job, Fork())
        await quiet(node)
