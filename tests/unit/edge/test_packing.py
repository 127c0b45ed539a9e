"""Packing a sandbox's writes: the order of steps, one at a time, who leaves, what ends meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from typing_extensions import override

from dsec.base.clock import SystemClock
from dsec.base.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    SandboxGone,
    StorageFull,
    Unsupported,
)
from dsec.base.states import SandboxState
from dsec.edge.histories import TRAJECTORY, Histories
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.record import SandboxRecord
from dsec.edge.service import EdgeService
from dsec.trajectory.reader import read
from dsec.wire.edge_v1 import CreateOnEdge, PauseOrder
from dsec.wire.sandbox import Fork, Pack
from tests.unit.edge.node import Node, request
from tests.unit.edge.packable import PackableBackend, PackableNode, nothing

S = SandboxState


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def node(tmp_path: Path) -> PackableNode:
    return PackableNode(tmp_path)


async def made(edge: EdgeService, **spec: object) -> str:
    return (await edge.create(request(**spec))).id


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not true():  # noqa: ASYNC110 - of files, which tell nobody
            await anyio.sleep(0.001)


async def happened(edge: EdgeService, sandbox: str, count: int) -> None:
    """Have so many entries in a sandbox's trajectory."""
    owner = await edge.owner(sandbox)
    recording = await edge.recordings.of(owner)
    while recording.steps < count:
        await recording.end(await recording.begin("file.write"), "ok")


def restored(snapshot: str, principal: str = "") -> CreateOnEdge:
    asked = request(image=f"snapshots/p/{snapshot}")
    asked.principal = principal
    return asked


async def test_it_stands_still_only_for_the_second_look(node: PackableNode) -> None:
    backend, fake = node.backend(), node.images.fake
    seen: dict[str, bool] = {}

    async def note(step: str) -> None:
        seen[step] = bool(backend.frozen)

    fake.on_look = lambda: note("look")
    fake.on_take = lambda: note("take")
    fake.on_layer = lambda: note("layer")
    async with node.edge(backends=[backend]) as edge:
        sandbox = await made(edge)
        node.write(sandbox, a=b"1")
        await happened(edge, sandbox, 3)
        view = await edge.pack(sandbox, Pack(name="s"), "me")
        assert (await edge.get(sandbox)).state is S.RUNNING
    assert seen == {"look": False, "take": True, "layer": False}
    assert fake.layers[view.digest] == {"a": b"1"}
    assert (view.step, view.packed_by, view.project, view.sandbox) == (3, "me", "p", sandbox)
    assert view.duration_ms >= view.frozen_ms >= 0


async def test_what_grew_too_much_runs_until_it_was_looked_at_again(node: PackableNode) -> None:
    backend, fake = node.backend(), node.images.fake
    frozen: list[bool] = []

    async def note() -> None:
        frozen.append(bool(backend.frozen))

    fake.grown, fake.on_look = 1, note
    async with node.edge(backends=[backend]) as edge:
        sandbox = await made(edge)
        await edge.pack(sandbox, Pack(name="s"), "me")
        assert (await edge.get(sandbox)).state is S.RUNNING
    assert fake.steps == ["look", "take", "look", "take", "layer"]
    assert frozen == [False, False]


async def test_a_paused_one_is_packed_without_waking_it(node: PackableNode) -> None:
    backend = node.backend()
    async with node.edge(backends=[backend]) as edge:
        sandbox = await made(edge)
        await edge.pause(sandbox)
        await edge.pack(sandbox, Pack(name="s"), "")
        assert (await edge.get(sandbox)).state is S.PAUSED
        assert backend.frozen == {sandbox}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_one_that_is_held_is_compared_and_not_packed(node: PackableNode, when: str) -> None:
    fake = node.images.fake
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)

        async def hold() -> None:
            await edge.pause(sandbox, PauseOrder(held="somebody else has it"))

        if when == "before":
            await hold()
        else:
            fake.on_look = hold
        with pytest.raises(Conflict, match="somebody else has it") as refused:
            await edge.pack(sandbox, Pack(name="s"), "")
        assert refused.value.details["kind"] == "held"
        assert fake.steps == ([] if when == "before" else ["look"])
        with pytest.raises(Conflict, match="somebody else has it"):
            async with edge.fork(sandbox, Fork(count=1), "") as items:
                assert [item async for item in items] == []
        await edge.diff(sandbox)
        assert (await edge.get(sandbox)).state is S.PAUSED
        fake.on_look = nothing
        await edge.resume(sandbox)
        await edge.pack(sandbox, Pack(name="s"), "")


async def test_one_at_a_time_for_one_sandbox(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(edge.pack, sandbox, Pack(name=name), "")
        assert node.images.fake.most_open == 1
        assert len(await edge.snapshots("p")) == 3


async def test_who_leaves_does_not_stop_it_halfway(node: PackableNode) -> None:
    fake, looking, go_on = node.images.fake, anyio.Event(), anyio.Event()

    async def wait() -> None:
        looking.set()
        await go_on.wait()

    fake.on_look = wait
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)
        async with anyio.create_task_group() as group:
            group.start_soon(edge.pack, sandbox, Pack(name="s"), "")
            await looking.wait()
            group.cancel_scope.cancel()
        go_on.set()
        await anyio.wait_all_tasks_blocked()
        assert [view.name for view in await edge.snapshots("p")] == ["s"]


async def test_a_stop_ends_it_and_nothing_is_left(node: PackableNode) -> None:
    fake, looking = node.images.fake, anyio.Event()

    async def wait() -> None:
        looking.set()
        await anyio.sleep_forever()

    fake.on_look = wait
    failures: list[Exception] = []
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)

        async def pack() -> None:
            try:
                await edge.pack(sandbox, Pack(name="s"), "")
            except SandboxGone as exc:
                failures.append(exc)

        async with anyio.create_task_group() as group:
            group.start_soon(pack)
            await looking.wait()
            assert (await edge.stop(sandbox)).state is S.STOPPED
        assert len(failures) == 1
        assert (fake.open, await edge.snapshots("p")) == (0, [])


async def test_a_full_disk_leaves_it_running_and_nothing_else(node: PackableNode) -> None:
    async def full() -> None:
        raise StorageFull("the disk is full")

    fake = node.images.fake
    for hook in ("on_look", "on_take", "on_layer"):
        fake.on_look = fake.on_take = fake.on_layer = anyio.lowlevel.checkpoint
        setattr(fake, hook, full)
        backend = node.backend()
        async with node.edge(backends=[backend]) as edge:
            sandbox = await made(edge)
            with pytest.raises(StorageFull):
                await edge.pack(sandbox, Pack(name="s"), "")
            assert (await edge.get(sandbox)).state is S.RUNNING
            assert (backend.frozen, await edge.snapshots("p"), fake.open) == (set(), [], 0)
            await edge.stop(sandbox)


@pytest.mark.parametrize("what", ["Journal.mark_all", "Histories.keep"])
async def test_a_full_disk_for_what_is_noted_down_says_so(
    node: PackableNode, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    backend, (kind, method) = node.backend(), what.split(".")
    async with node.edge(backends=[backend]) as edge:
        sandbox = await made(edge)
        await happened(edge, sandbox, 2)
        with monkeypatch.context() as patch:
            patch.setattr({"Journal": Journal, "Histories": Histories}[kind], method, full)
            with pytest.raises(StorageFull):
                await edge.pack(sandbox, Pack(name="s"), "")
        assert ((await edge.get(sandbox)).state, backend.frozen) == (S.RUNNING, set())
        await edge.pack(sandbox, Pack(name="s"), "")


async def test_the_simulation_says_that_it_has_nothing_to_pack(tmp_path: Path) -> None:
    simulated = Node(tmp_path)
    simulated.clock = SystemClock()
    async with simulated.edge() as edge:
        sandbox = await made(edge)
        with pytest.raises(Unsupported, match="keeps no writable layer"):
            await edge.pack(sandbox, Pack(name="s"), "")
        with pytest.raises(Unsupported, match="keeps no writable layer"):
            await edge.diff(sandbox)


async def test_a_difference_is_listed_without_freezing(node: PackableNode) -> None:
    class Unfreezable(PackableBackend):
        @override
        async def freeze(self, record: SandboxRecord) -> None:
            raise AssertionError(f"{record.id} was frozen")

    backend = Unfreezable(node.clock, node.host, node.faults, node.images)
    async with node.edge(backends=[backend]) as edge:
        sandbox = await made(edge)
        node.write(sandbox, b=b"", a=b"1")
        assert [entry.path for entry in await edge.diff(sandbox)] == ["/a", "/b"]
        await edge.stop(sandbox)
        with pytest.raises(SandboxGone):
            await edge.diff(sandbox)


async def test_a_restored_sandbox_begins_with_what_had_happened(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)
        await happened(edge, sandbox, 4)
        await edge.pack(sandbox, Pack(name="s"), "")
        await happened(edge, sandbox, 9)  # what came later is not its child's
        await edge.stop(sandbox)
    async with node.edge(backends=[node.backend()]) as edge:  # and the edge was restarted
        child = (await edge.create(restored("s"))).id
        file = node.root / "state" / "sandboxes" / child / TRAJECTORY
        assert [(entry.seq, entry.inherited) for entry in read(file, until=4)] == [
            (n, True) for n in range(1, 5)
        ]


async def test_what_is_not_cleaned_is_restored_by_its_packer_alone(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)
        await edge.pack(sandbox, Pack(name="mine", clean=False), "me")
        await edge.pack(sandbox, Pack(name="all"), "me")
        for principal in ("you", ""):
            with pytest.raises(PermissionDenied, match="clean=False"):
                await edge.create(restored("mine", principal))
            assert (await edge.create(restored("all", principal))).state is S.RUNNING
        assert (await edge.create(restored("mine", "me"))).state is S.RUNNING


async def test_what_was_done_is_told_again_to_its_packer_alone(node: PackableNode) -> None:
    async with node.host.running(), node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge, env={"TOKEN": "secret-of-the-spec"})
        async with node.client(edge) as client:
            place = f"/v1/sandboxes/{sandbox}"
            command = {"shell": "echo secret-of-the-shell", "env": {"KEY": "secret-of-the-env"}}
            assert (await client.post(f"{place}/commands/run", json=command)).status_code == 200
            asked = {"path": "/tmp/key"}
            await client.put(f"{place}/files", params=asked, content=b"secret-of-a-file")
        await edge.pack(sandbox, Pack(name="s"), "builder")
        for principal, inherits in (("builder", True), ("you", False), ("", False)):
            child = (await edge.create(restored("s", principal))).id
            told = node.trajectory(child).read_bytes()
            for secret in (b"of-the-spec", b"of-the-shell", b"of-the-env", b"of-a-file"):
                assert (secret in told) is inherits, (principal, secret)
            assert any(entry.inherited for entry in read(node.trajectory(child))) is inherits


async def test_a_name_that_exists_keeps_its_own_history(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        one, two = await made(edge), await made(edge)
        await happened(edge, one, 2)
        await happened(edge, two, 3)
        await edge.pack(one, Pack(name="s"), "")
        with pytest.raises(Conflict):
            await edge.pack(two, Pack(name="s"), "")
        child = (await edge.create(restored("s"))).id
        file = node.root / "state" / "sandboxes" / child / TRAJECTORY
        assert sum(entry.inherited for entry in read(file)) == 2


async def test_a_name_that_is_taken_is_refused_before_anything_is_done(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        one, two = await made(edge), await made(edge)
        await edge.pack(one, Pack(name="s"), "")
        await happened(edge, two, 3)
        done, kept = len(node.images.fake.steps), histories(node)
        with pytest.raises(Conflict):
            await edge.pack(two, Pack(name="s"), "")
        assert (len(node.images.fake.steps), histories(node)) == (done, kept)


async def test_a_pack_that_fails_leaves_no_history(node: PackableNode) -> None:
    fake, failure = node.images.fake, [StorageFull("the disk is full")]

    async def fail() -> None:
        if failure:
            raise failure.pop()

    fake.on_layer = fail
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox, other = await made(edge), await made(edge)
        await happened(edge, sandbox, 3)
        with pytest.raises(StorageFull):
            await edge.pack(sandbox, Pack(name="s"), "")
        assert histories(node) == []
        together: list[Exception | None] = []

        async def pack(which: str) -> None:
            try:
                await edge.pack(which, Pack(name="s"), "")
                together.append(None)
            except Conflict as exc:
                together.append(exc)

        async with anyio.create_task_group() as group:  # the name is free for both at first
            group.start_soon(pack, sandbox)
            group.start_soon(pack, other)
        assert together.count(None) == 1
        kept = fake.views["p", "s"]
        assert histories(node) == ["p", "p/s", f"p/s/{kept.sandbox}.{kept.step}"]


async def test_a_history_that_cannot_be_copied_leaves_no_directory(
    node: PackableNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(_trajectory: Path, _step: int, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dsec.edge.histories.copy_history", half)
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)
        await happened(edge, sandbox, 2)
        with pytest.raises(StorageFull):
            await edge.pack(sandbox, Pack(name="s"), "")
        assert histories(node) == []


def histories(node: PackableNode) -> list[str]:
    root = node.root / "state" / "histories"
    return [str(path.relative_to(root)) for path in sorted(root.rglob("*"))]


async def test_a_removed_snapshot_leaves_no_history(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)
        await happened(edge, sandbox, 2)
        await edge.pack(sandbox, Pack(name="s"), "")
        assert histories(node) == ["p", "p/s", f"p/s/{sandbox}.2"]
        child = (await edge.create(restored("s"))).id
        with pytest.raises(Conflict, match=child):
            await edge.remove_snapshot("p", "s")
        await edge.stop(child)
        await edge.remove_snapshot("p", "s")
        assert histories(node) == []
        with pytest.raises(NotFound):
            await edge.remove_snapshot("p", "s")


async def test_what_a_crash_left_of_a_history_is_swept(node: PackableNode) -> None:
    async with node.edge(backends=[node.backend()]) as edge:
        sandbox = await made(edge)
        await happened(edge, sandbox, 2)
        await edge.pack(sandbox, Pack(name="kept"), "")
        await edge.pack(sandbox, Pack(name="gone"), "")
    del node.images.fake.views["p", "gone"]
    root = node.root / "state" / "histories"
    (root / ".fork-x").write_bytes(b"half")
    (root / "p" / "kept" / "another.7").write_bytes(b"of a packing that was cut off")
    async with node.edge(backends=[node.backend()]):
        await until(lambda: histories(node) == ["p", "p/kept", f"p/kept/{sandbox}.2"])
