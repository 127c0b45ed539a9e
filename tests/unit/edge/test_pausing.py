"""Pausing on a simulated host: transitions, who waits for them, and what a crash leaves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial

import anyio
import msgspec
import pytest

from dsec.base.errors import CapacityUnavailable, Conflict, InternalError, SandboxGone
from dsec.base.states import SandboxState, StopReason
from dsec.edge import commands
from dsec.edge.admission import AdmissionLimits
from dsec.edge.lifecycle import resting
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.service import EdgeService
from dsec.wire.edge_v1 import PauseOrder
from dsec.wire.sandbox import CommandSpec, NetworkChange, Resize
from tests.unit.edge.node import Node, request

S = SandboxState


async def run(owner: Owner, *argv: str) -> int | None:
    return (await commands.run(owner, CommandSpec(argv=list(argv)))).exit_code


async def made(edge: EdgeService, **spec: object) -> Owner:
    view = await edge.create(request(**spec))
    return await edge.owner(view.id)


async def test_a_paused_sandbox_is_seen_paused_and_goes_on(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        view = await edge.pause(owner.record.id)
        assert (view.state, view.pause is not None) == (S.PAUSED, True)
        again = await edge.pause(owner.record.id)
        assert again.pause == view.pause
        view = await edge.resume(owner.record.id)
        assert (view.state, view.pause) == (S.RUNNING, None)
        assert (await edge.resume(owner.record.id)).state is S.RUNNING
        assert await run(owner, "true") == 0


async def test_looking_at_it_does_not_wake_it(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        await edge.pause(owner.record.id)
        await edge.usage(owner.record.id)
        assert (await edge.get(owner.record.id)).state is S.PAUSED


async def test_whatever_is_asked_of_it_wakes_it(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        await edge.pause(owner.record.id)
        assert await edge.owner(owner.record.id) is owner
        assert owner.state is S.RUNNING
        await edge.pause(owner.record.id)
        assert await run(owner, "true") == 0  # had been found before the pause
        assert owner.state is S.RUNNING


async def test_a_command_in_flight_waits_with_the_sandbox(node: Node) -> None:
    async with node.edge() as edge, anyio.create_task_group() as group:
        owner = await made(edge)
        codes: list[int | None] = []

        async def work() -> None:
            codes.append(await run(owner, "sleep", "0.1"))

        living = node.host.sandboxes[owner.record.id].table.living
        group.start_soon(work)
        while not living:
            await anyio.lowlevel.checkpoint()
        await edge.pause(owner.record.id)
        while living:  # noqa: ASYNC110 - the simulation says it by no event, and its clock must move
            await anyio.sleep(0.01)
        await anyio.wait_all_tasks_blocked()
        assert codes == []
        await edge.resume(owner.record.id)
    assert codes == [0]


async def test_who_comes_while_it_is_being_paused_waits_and_wakes_it(node: Node) -> None:
    async with node.edge() as edge, anyio.create_task_group() as group:
        owner = await made(edge)
        gate = node.faults.hold("freeze")
        codes: list[int | None] = []

        async def work() -> None:
            codes.append(await run(owner, "true"))

        group.start_soon(edge.pause, owner.record.id)
        await anyio.wait_all_tasks_blocked()
        assert owner.state is S.PAUSING
        group.start_soon(work)
        group.start_soon(edge.resume, owner.record.id)
        await anyio.wait_all_tasks_blocked()
        assert codes == []
        gate.set()
        with anyio.fail_after(5):
            while not codes:
                await anyio.wait_all_tasks_blocked()
        assert (codes, owner.state) == ([0], S.RUNNING)


@pytest.mark.parametrize("how", ["use", "resume", "stop"])
@pytest.mark.parametrize("step", ["freeze", "reclaim"])
async def test_who_wants_it_does_not_wait_until_its_memory_is_given_back(
    node: Node, how: str, step: str
) -> None:
    async with node.edge() as edge, anyio.create_task_group() as group:
        owner = await made(edge)
        node.faults.hold("reclaim")  # for ever
        freezing = node.faults.hold("freeze")
        group.start_soon(_quietly, edge.pause, owner.record.id)
        await anyio.wait_all_tasks_blocked()
        if step == "reclaim":
            freezing.set()
            await anyio.wait_all_tasks_blocked()
        assert owner.state is S.PAUSING
        wants: dict[str, Callable[[], Coroutine[object, object, object]]] = {
            "use": partial(run, owner, "true"),
            "resume": partial(edge.resume, owner.record.id),
            "stop": partial(edge.stop, owner.record.id),
        }
        group.start_soon(wants[how])
        await anyio.wait_all_tasks_blocked()
        freezing.set()
        wanted = S.STOPPED if how == "stop" else S.RUNNING
        with anyio.fail_after(60):
            while owner.state is not wanted:
                await anyio.wait_all_tasks_blocked()


async def test_what_has_been_called_off_does_not_hurry_the_next_pause(node: Node) -> None:
    async with node.edge() as edge, anyio.create_task_group() as group:
        owner = await made(edge)
        gate = node.faults.hold("reclaim")
        group.start_soon(edge.pause, owner.record.id)
        await anyio.wait_all_tasks_blocked()
        assert await run(owner, "true") == 0
        group.start_soon(edge.pause, owner.record.id)
        await anyio.wait_all_tasks_blocked()
        assert (await edge.get(owner.record.id)).state is S.PAUSING
        gate.set()
        with anyio.fail_after(60):
            while (await edge.get(owner.record.id)).state is not S.PAUSED:
                await anyio.wait_all_tasks_blocked()


async def test_a_pause_that_fails_leaves_it_running(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        node.faults.fail_freezes = 1
        with pytest.raises(InternalError, match="stand still"):
            await edge.pause(owner.record.id)
        assert owner.state is S.RUNNING
        assert await run(owner, "true") == 0
        assert (await edge.pause(owner.record.id)).state is S.PAUSED


async def test_without_room_it_stays_paused(node: Node) -> None:
    async with node.edge(limits=AdmissionLimits(memory_floor_bytes=0, max_sandboxes=1)) as edge:
        owner = await made(edge)
        with pytest.raises(CapacityUnavailable):
            await made(edge)
        await edge.pause(owner.record.id)
        other = await made(edge)
        for _ in range(2):
            with pytest.raises(CapacityUnavailable):
                await edge.resume(owner.record.id)
            assert owner.state is S.PAUSED
        await edge.stop(other.record.id)
        assert (await edge.resume(owner.record.id)).state is S.RUNNING


@pytest.mark.parametrize("where", ["freeze", "reclaim", "thaw", ""])
async def test_a_stop_works_in_every_state(node: Node, where: str) -> None:
    async with node.edge() as edge, anyio.create_task_group() as group:
        owner = await made(edge)
        if where in ("thaw", ""):
            await edge.pause(owner.record.id)
        if where:
            gate = node.faults.hold(where)
            change = edge.resume if where == "thaw" else edge.pause
            group.start_soon(_quietly, change, owner.record.id)
            await anyio.wait_all_tasks_blocked()
            assert owner.state in (S.PAUSING, S.RESUMING)
            group.start_soon(edge.stop, owner.record.id)
            await anyio.wait_all_tasks_blocked()
            gate.set()
            await owner.over.wait()
        else:
            await edge.stop(owner.record.id)
        view = await edge.get(owner.record.id)
        assert (view.state, view.stop_reason) == (S.STOPPED, StopReason.REQUESTED)
        assert view.pause is None
    assert node.host.sandboxes == {}


async def _quietly(change: object, sandbox: str) -> None:
    try:
        await change(sandbox)  # type: ignore[operator]
    except SandboxGone:
        return


async def test_its_death_while_paused_is_told(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        await edge.pause(owner.record.id)
        node.host.kill(owner.record.id, "killed by signal 9")
        with anyio.fail_after(5):
            await owner.over.wait()
        view = await edge.get(owner.record.id)
        assert (view.state, view.stop_reason) == (S.FAILED, StopReason.DIED)
        assert view.stop_detail == "killed by signal 9"
        with pytest.raises(SandboxGone):
            await edge.resume(owner.record.id)


async def test_a_connection_that_breaks_in_a_pause_is_made_again_after_it(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        await edge.pause(owner.record.id)
        node.host.drop_channel(owner.record.id)
        with anyio.fail_after(5):
            while owner.channel is not None:
                await anyio.wait_all_tasks_blocked()
        assert owner.state is S.PAUSED
        assert await run(owner, "true") == 0


async def test_a_paused_sandbox_outlives_the_edge_paused(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            owner = await made(edge)
            pause = (await edge.pause(owner.record.id)).pause
        async with node.edge() as edge:
            view = await edge.get(owner.record.id)
            assert (view.state, view.pause) == (S.PAUSED, pause)
            assert node.host.sandboxes[owner.record.id].frozen
            assert await run(await edge.owner(owner.record.id), "true") == 0


HELD = PauseOrder(held="somebody else has it")


async def test_one_that_is_held_wakes_by_an_explicit_resume_alone(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            owner = await made(edge)
            sandbox = owner.record.id
            plain = await edge.pause(sandbox)
            view = await edge.pause(sandbox, HELD)
            assert plain.pause is not None
            assert view.pause == msgspec.structs.replace(plain.pause, held=HELD.held)
            with pytest.raises(Conflict, match=HELD.held):
                await edge.owner(sandbox)
            with pytest.raises(Conflict, match="explicit resume"):
                await run(owner, "true")  # had been found before
            assert (await edge.pause(sandbox)).pause == view.pause
        async with node.edge() as edge:  # and it is so after a restart
            with pytest.raises(Conflict, match=HELD.held):
                await edge.owner(sandbox)
            assert (await edge.resume(sandbox)).state is S.RUNNING
            await edge.pause(sandbox)
            assert await run(await edge.owner(sandbox), "true") == 0


async def test_one_that_is_held_is_looked_at_and_not_changed(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            sandbox = (await made(edge, network=True)).record.id
            await edge.pause(sandbox)
            assert (await edge.resize(sandbox, Resize(pids=40))).limits.pids == 40  # not held
            await edge.pause(sandbox, HELD)
        async with node.edge() as edge:  # which makes what was changed hold, held or not
            assert (await edge.get(sandbox)).limits.pids == 40
            with pytest.raises(Conflict, match=HELD.held):
                await edge.resize(sandbox, Resize(pids=50))
            with pytest.raises(Conflict, match=HELD.held):
                await edge.set_network(sandbox, NetworkChange(rules={}))
            assert (await edge.usage(sandbox)).pids >= 0
            await edge.network(sandbox)
            view = await edge.get(sandbox)
            assert (view.state, view.limits.pids) == (S.PAUSED, 40)
            await edge.resume(sandbox)
            assert (await edge.resize(sandbox, Resize(pids=50))).limits.pids == 50


async def test_one_that_is_held_at_length_is_held_after_a_restart(node: Node) -> None:
    order = PauseOrder(held='"epoch" ' * 400)
    async with node.host.running():
        async with node.edge() as edge:
            sandbox = (await made(edge)).record.id
            await edge.pause(sandbox, order)
        async with node.edge() as edge:
            view = await edge.get(sandbox)
            assert view.pause is not None
            assert view.pause.at > 0
            with pytest.raises(Conflict, match="explicit resume"):
                await edge.owner(sandbox)


@pytest.mark.parametrize("where", ["freeze", "reclaim"])
async def test_one_that_runs_is_paused_and_held_in_one_go(node: Node, where: str) -> None:
    async with node.edge() as edge, anyio.create_task_group() as group:
        owner = await made(edge)
        gate = node.faults.hold(where)
        group.start_soon(edge.pause, owner.record.id, HELD)
        await anyio.wait_all_tasks_blocked()
        refused = []

        async def use() -> None:
            with pytest.raises(Conflict, match=HELD.held):
                await run(owner, "true")
            refused.append(True)

        group.start_soon(use)  # waits for its turn, which comes after the pause
        await anyio.wait_all_tasks_blocked()
        assert (owner.state, refused) == (S.PAUSING, [])  # nor does it cut the pause short
        gate.set()
    assert refused == [True]
    assert owner.state is S.PAUSED


async def test_one_that_died_paused_while_no_edge_looked_is_lost(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            owner = await made(edge)
            await edge.pause(owner.record.id)
        node.host.kill(owner.record.id)
        async with node.edge() as edge:
            view = await edge.get(owner.record.id)
            assert (view.state, view.stop_reason) == (S.LOST, StopReason.NODE_LOST)
        assert node.host.sandboxes == {}


async def test_fifty_operations_while_it_is_paused_and_resumed(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        codes: list[int | None] = []

        async def work(number: int) -> None:
            for _ in range(number % 5):
                await anyio.lowlevel.checkpoint()
            codes.append(await run(await edge.owner(owner.record.id), "true"))

        async def flap() -> None:
            for _ in range(20):
                await edge.pause(owner.record.id)
                await edge.resume(owner.record.id)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(flap)
                for number in range(50):
                    group.start_soon(work, number)
        assert codes == [0] * 50


async def test_still_freezes_for_a_moment_and_only_then(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        aether = node.host.sandboxes[owner.record.id]
        async with owner.still():
            assert (aether.frozen, owner.state) == (True, S.RUNNING)
        assert not aether.frozen
        with pytest.raises(ZeroDivisionError):
            async with owner.still():
                raise ZeroDivisionError
        assert not aether.frozen
        await edge.pause(owner.record.id)
        async with owner.still():
            pass
        assert (aether.frozen, owner.state) == (True, S.PAUSED)


async def test_a_paused_one_that_does_not_stand_still_is_made_to(node: Node) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        await edge.pause(owner.record.id)
        aether = node.host.sandboxes[owner.record.id]
        aether.thaw()  # as half of a failed thaw leaves it
        async with owner.still():
            assert aether.frozen
        assert (aether.frozen, owner.state) == (True, S.PAUSED)


async def test_one_left_still_by_a_crash_is_let_go_on(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            owner = await made(edge)
            edge._journal.mark(owner.record.id, "begun", "still")
            node.host.sandboxes[owner.record.id].freeze()
        async with node.edge() as edge:
            assert (await edge.get(owner.record.id)).state is S.RUNNING
            assert await run(await edge.owner(owner.record.id), "true") == 0


async def _cannot_go_on(node: Node, owner: Owner, how: str, more: int = 0) -> None:
    node.faults.fail_thaws = 1 + more
    if how == "pause":
        node.faults.fail_freezes = 1
        await owner.pause()
    else:
        async with owner.still():
            pass


@pytest.mark.parametrize("how", ["pause", "still"])
async def test_one_that_cannot_be_let_go_on_says_so_and_is_tried_again(
    node: Node, how: str
) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        with pytest.raises(InternalError, match="does not go on"):
            await _cannot_go_on(node, owner, how)
        assert owner.channel is not None
        assert not owner.channel._patience._held  # what is open does not wait for ever
        view = await edge.get(owner.record.id)
        assert view.state is S.PAUSED
        assert view.pause is not None
        assert "could not be let go on" in view.pause.detail
        node.faults.fail_thaws = 1
        with pytest.raises(InternalError, match="does not go on"):
            await edge.resume(owner.record.id)
        assert owner.state is S.PAUSED
        with anyio.fail_after(5):
            assert await run(owner, "true") == 0
        assert (owner.state, owner.paused) == (S.RUNNING, None)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("how", ["pause", "still"])
async def test_one_that_could_not_be_let_go_on_is_tried_once_more_by_itself(
    node: Node, monkeypatch: pytest.MonkeyPatch, how: str, more: int
) -> None:
    monkeypatch.setattr(resting, "AGAIN_S", 0.2)
    async with node.edge() as edge:
        owner = await made(edge)
        with pytest.raises(InternalError, match="does not go on"):
            await _cannot_go_on(node, owner, how, more)
        await _until(lambda: owner.state is not S.PAUSED or node.faults.fail_thaws < more)
        await _until(lambda: owner.state is not S.RESUMING)
        assert (owner.state, node.faults.fail_thaws) == (S.PAUSED if more else S.RUNNING, 0)


async def test_at_the_edges_start_it_is_tried_once_more_too(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting, "AGAIN_S", 0.2)
    async with node.host.running():
        async with node.edge() as edge:
            owner = await made(edge)
            edge._journal.mark(owner.record.id, "begun", "still")
            node.host.sandboxes[owner.record.id].freeze()
        node.faults.fail_thaws = 1
        async with node.edge() as edge:
            owner = await edge.owner(owner.record.id, awake=False)
            await _until(lambda: owner.state is S.RUNNING)


async def _until(done: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not done():  # noqa: ASYNC110 - nobody is told of it
            await anyio.sleep(0.001)


@pytest.mark.parametrize("how", ["pause", "still"])
async def test_one_that_could_not_be_let_go_on_runs_after_a_restart(node: Node, how: str) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            owner = await made(edge)
            with pytest.raises(InternalError):
                await _cannot_go_on(node, owner, how)
            node.host.sandboxes[owner.record.id].freeze()
        async with node.edge() as edge:
            assert (await edge.get(owner.record.id)).state is S.RUNNING
            assert not node.host.sandboxes[owner.record.id].frozen


async def test_one_that_cannot_be_let_go_on_at_the_edges_start_is_not_lost(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            owner = await made(edge)
            edge._journal.mark(owner.record.id, "begun", "still")
            node.host.sandboxes[owner.record.id].freeze()
        node.faults.fail_thaws = 1
        async with node.edge() as edge:
            assert (await edge.get(owner.record.id)).state is S.PAUSED
            assert await run(await edge.owner(owner.record.id), "true") == 0


@pytest.mark.parametrize("fault", ["fail_freezes", "fail_connects"])
async def test_a_paused_one_is_not_lost_by_what_the_host_lacks_for_a_moment(
    node: Node, fault: str
) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            owner = await made(edge)
            pause = (await edge.pause(owner.record.id)).pause
        setattr(node.faults, fault, 1)
        async with node.edge() as edge:
            view = await edge.get(owner.record.id)
            assert (view.state, view.pause) == (S.PAUSED, pause)
            assert await run(await edge.owner(owner.record.id), "true") == 0
