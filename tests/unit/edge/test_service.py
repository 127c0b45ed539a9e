from __future__ import annotations

import errno

import anyio
import pytest

from dsec.base.errors import (
    CapacityUnavailable,
    Conflict,
    InvalidRequest,
    NotFound,
    SandboxGone,
    StartFailed,
    StorageFull,
    Unavailable,
    Unsupported,
)
from dsec.base.states import SandboxState, StopReason
from dsec.edge import commands
from dsec.edge.admission import AdmissionLimits
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.service import EdgeService
from dsec.wire.edge_v1 import CreateOnEdge, ListFilter
from dsec.wire.sandbox import CommandSpec, Limits
from tests.unit.edge.node import Node, image, request


async def test_create_use_and_stop(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request(labels={"job": "7"})
        view = await edge.create(asked)
        assert view.state is SandboxState.RUNNING
        assert view.labels == {"job": "7"}
        owner = await edge.owner(asked.id)
        result = await commands.run(owner, CommandSpec(argv=["echo", "hi"]))
        assert (result.exit_code, result.stdout.join()) == (0, b"hi\n")
        ended = await edge.stop(asked.id)
        assert (ended.state, ended.stop_reason) == (SandboxState.STOPPED, StopReason.REQUESTED)
        assert await edge.stop(asked.id) == ended
        with pytest.raises(SandboxGone, match="requested"):
            await edge.owner(asked.id)
        assert node.host.sandboxes == {}


async def test_the_same_id_at_once_is_one_launch(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        views = []

        async def create() -> None:
            views.append(await edge.create(asked))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(create)
        assert len({view.created_at for view in views}) == 1
        assert len(node.host.sandboxes) == 1
        assert (await edge.create(asked)).id == asked.id


async def test_a_caller_who_leaves_does_not_undo_a_creation(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        node.faults.launch_delay_s = 0.1
        with anyio.move_on_after(0.01):
            await edge.create(asked)
        assert (await edge.create(asked)).state is SandboxState.RUNNING


async def test_a_failed_launch_says_where_and_leaves_nothing(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        node.faults.fail_launch_at = "clone"
        asked = request()
        with pytest.raises(StartFailed) as caught:
            await edge.create(asked)
        assert caught.value.details["step"] == "clone"
        assert (await edge.get(asked.id)).stop_reason is StopReason.LAUNCH_FAILED
        with pytest.raises(StartFailed):
            await edge.create(asked)
        assert node.host.sandboxes == {}
        assert list((node.root / "state" / "sandboxes").iterdir()) == []
        assert (await edge.create(request())).state is SandboxState.RUNNING


async def test_a_full_disk_is_named_and_leaves_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with node.host.running(), node.edge() as edge:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "create", full)
            with pytest.raises(StorageFull, match="is full"):
                await edge.create(request())
        assert node.host.sandboxes == {}
        assert (await edge.create(request())).state is SandboxState.RUNNING


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (request(image="nothing"), NotFound),
        (request(backend="fullvm"), Unsupported),
        (request(limits=Limits(memory_mb=4 << 20)), InvalidRequest),
        (CreateOnEdge(id="sbx0000" + "0" * 16, project="p", spec=request().spec), InvalidRequest),
        (CreateOnEdge(id="nonsense", project="p", spec=request().spec), NotFound),
    ],
)
async def test_what_cannot_be_had_is_refused_before_anything_starts(
    node: Node, asked: CreateOnEdge, error: type[Exception]
) -> None:
    async with node.host.running(), node.edge() as edge:
        with pytest.raises(error):
            await edge.create(asked)
        assert await edge.list_sandboxes(ListFilter()) == []


async def test_a_full_node_refuses_and_takes_again(node: Node) -> None:
    limits = AdmissionLimits(max_sandboxes=2, memory_floor_bytes=0)
    async with node.host.running(), node.edge(limits=limits) as edge:
        first = request()
        await edge.create(first)
        await edge.create(request())
        refused = request()
        with pytest.raises(CapacityUnavailable, match="2 sandboxes are live"):
            await edge.create(refused)
        await edge.stop(first.id)
        assert (await edge.create(refused)).state is SandboxState.RUNNING


async def test_a_burst_waits_in_a_bounded_queue(node: Node) -> None:
    limits = AdmissionLimits(max_launching=2, max_waiting=3, memory_floor_bytes=0)
    async with node.host.running(), node.edge(limits=limits) as edge:
        go = node.faults.hold("cgroups")
        taken, refused = [], []

        async def create() -> None:
            try:
                taken.append(await edge.create(request()))
            except CapacityUnavailable as exc:
                refused.append(exc)

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(create)
                await anyio.wait_all_tasks_blocked()
            go.set()
        assert (len(taken), len(refused)) == (5, 3)


async def test_a_death_is_noticed_and_open_streams_hear_of_it(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        owner = await edge.owner(asked.id)
        caught: list[Exception] = []

        async def wait() -> None:
            try:
                await commands.run(owner, CommandSpec(argv=["sleep", "3000"]))
            except SandboxGone as exc:
                caught.append(exc)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            node.host.kill(asked.id, "it was killed by a test")
            with anyio.fail_after(5):
                await owner.over.wait()
        assert "killed by a test" in str(caught[0])
        view = await edge.get(asked.id)
        assert (view.state, view.stop_reason) == (SandboxState.FAILED, StopReason.DIED)
        assert node.host.sandboxes == {}


async def test_lists_are_filtered_and_newest_first(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        old, new = request(labels={"a": "1"}), request(labels={"a": "1", "b": "2"})
        await edge.create(old)
        await anyio.sleep(0.01)
        await edge.create(new)
        await edge.stop(old.id)

        async def ids(**wanted: object) -> list[str]:
            found = await edge.list_sandboxes(ListFilter(**wanted))  # type: ignore[arg-type]
            return [view.id for view in found]

        assert await ids(labels={"a": "1"}) == [new.id, old.id]
        assert await ids(labels={"b": "2"}) == [new.id]
        assert await ids(states=["stopped"]) == [old.id]
        assert await ids(project="other") == []


async def test_a_stop_that_cannot_clean_says_so_and_may_be_repeated(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        node.faults.fail_cleans = 4
        with pytest.raises(Exception, match="cannot remove"):
            await edge.stop(asked.id)
        assert (await edge.get(asked.id)).state is SandboxState.STOPPING
        assert (await edge.stop(asked.id)).state is SandboxState.STOPPED


async def _idle(edge: EdgeService, sandbox: str, seconds: float) -> SandboxState:
    await anyio.sleep(seconds)
    return (await edge.get(sandbox)).state


async def test_idle_sandboxes_are_stopped_and_busy_ones_are_not(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        idle, busy = request(ttl_running_stop=0.2), request(ttl_running_stop=0.2)
        await edge.create(idle)
        await edge.create(busy)
        await commands.start(await edge.owner(busy.id), CommandSpec(argv=["sleep", "0.5"]))
        assert await _idle(edge, idle.id, 0.4) is SandboxState.STOPPED
        assert (await edge.get(idle.id)).stop_reason is StopReason.IDLE
        assert (await edge.get(busy.id)).state is SandboxState.RUNNING
        # idle from the command's end on, at 0.5
        assert await _idle(edge, busy.id, 0.2) is SandboxState.RUNNING
        assert await _idle(edge, busy.id, 0.4) is SandboxState.STOPPED


async def test_a_lifetime_ends_even_a_busy_one(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request(ttl_running_stop=None, max_lifetime_s=0.3)
        await edge.create(asked)
        await commands.start(await edge.owner(asked.id), CommandSpec(argv=["sleep", "3000"]))
        assert await _idle(edge, asked.id, 0.15) is SandboxState.RUNNING
        assert await _idle(edge, asked.id, 0.4) is SandboxState.STOPPED
        assert (await edge.get(asked.id)).stop_reason is StopReason.LIFETIME


async def test_images(node: Node) -> None:
    async with node.host.running(), node.edge() as edge:
        asked = request()
        await edge.create(asked)
        with pytest.raises(Conflict, match="is used by"):
            await edge.remove_image("debian")
        await edge.stop(asked.id)
        await edge.remove_image("debian")
        assert await edge.images() == []


async def test_a_restarted_edge_adopts(node: Node) -> None:
    asked, over = request(), request()
    async with node.host.running():
        async with node.edge() as edge:
            await edge.create(asked)
            await edge.create(over)
            await edge.stop(over.id)
            await commands.start(
                await edge.owner(asked.id), CommandSpec(argv=["sleep", "0.1"], command_id="c1")
            )
        async with node.edge() as edge:
            assert (await edge.get(asked.id)).state is SandboxState.RUNNING
            assert (await edge.get(over.id)).stop_reason is StopReason.REQUESTED
            result = await commands.result(await edge.owner(asked.id), "c1")
            assert result.exit_code == 0
            again = request()
            await edge.create(again)
            bases = {(await edge.owner(s)).record.uid_base for s in (asked.id, again.id)}
            assert len(bases) == 2


async def test_one_that_died_meanwhile_is_lost(node: Node) -> None:
    asked = request()
    async with node.host.running():
        async with node.edge() as edge:
            await edge.create(asked)
        node.host.kill(asked.id)
        async with node.edge() as edge:
            view = await edge.get(asked.id)
            assert (view.state, view.stop_reason) == (SandboxState.LOST, StopReason.NODE_LOST)
            with pytest.raises(SandboxGone, match="node_lost"):
                await edge.owner(asked.id)
        assert node.host.sandboxes == {}


async def test_who_waits_for_the_store_holds_up_nobody(node: Node) -> None:
    node.images.records["far"] = image("far")
    node.images.far = anyio.Event()
    limits = AdmissionLimits(memory_floor_bytes=0, max_launching=1)
    async with node.host.running(), node.edge(limits=limits) as edge:
        async with anyio.create_task_group() as group:
            waiting = request(image="far")
            group.start_soon(edge.create, waiting)
            await anyio.wait_all_tasks_blocked()
            assert (await edge.create(request())).state is SandboxState.RUNNING
            assert (await edge.get(waiting.id)).state is SandboxState.CREATING
            node.images.far.set()
        assert (await edge.get(waiting.id)).state is SandboxState.RUNNING


async def test_a_store_that_fails_fails_the_creation(node: Node) -> None:
    node.images.records["far"] = image("far")
    node.images.refusal = Unavailable("the store does not answer")
    async with node.host.running(), node.edge() as edge:
        asked = request(image="far")
        with pytest.raises(Unavailable, match="the store"):
            await edge.create(asked)
        with pytest.raises(NotFound):
            await edge.get(asked.id)
        assert node.images.pins == {}
