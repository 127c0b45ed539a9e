"""Whose epoch nobody holds any more is stopped or paused, once, whatever goes down meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import trio.testing
from typing_extensions import override

from dsec.base.errors import Conflict, Unavailable, Unsupported
from dsec.base.ids import NodeId, PrincipalId, ProjectId, mint_sandbox_id
from dsec.base.states import SandboxState
from dsec.control import reaping
from dsec.control.access import Caller
from dsec.control.edges import Edge, Edges
from dsec.control.leases import Leases
from dsec.control.reaping import LATE_S, Reaper
from dsec.iam.permissions import OWNER
from dsec.iam.principals import Grant, Principal
from dsec.iam.projects import ProjectTree
from dsec.store.memory import MemoryLeases
from dsec.store.records import Lease
from dsec.wire.edge_v1 import ASKED, PLAIN, CreateOnEdge, ListFilter, PauseOrder, StopOrder
from dsec.wire.public_v1 import LeaseRequest
from dsec.wire.sandbox import SandboxSpec, SandboxView
from tests.system.fake_edge import FakeEdge

pytestmark = pytest.mark.anyio
TEAM = ProjectId("team")
TREE = ProjectTree({TEAM: None})
ADA = Caller(Principal(PrincipalId("ada"), "ada", "person", TEAM, (Grant(TEAM, OWNER),)), TREE)
RUNNING, PAUSED, STOPPED = SandboxState.RUNNING, SandboxState.PAUSED, SandboxState.STOPPED


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Clock:
    """The jumping clock, whose wall time can be set."""

    def __init__(self) -> None:
        self.offset = 1.8e9

    def now(self) -> float:
        return self.offset + self.monotonic()

    def monotonic(self) -> float:
        return anyio.current_time()


class Node(FakeEdge):
    """Counts what is asked of it."""

    def __init__(self, node: str = "n001") -> None:
        super().__init__(node)
        self.asked: list[str] = []
        self.stuck: anyio.Event | None = None

    async def make(self, job: str = "run", epoch: int = 1, project: str = "team") -> str:
        sandbox = mint_sandbox_id(NodeId(self.node))
        spec = SandboxSpec(image="debian", backend="sim", job=job, epoch=epoch)
        await self.create(CreateOnEdge(id=sandbox, project=project, spec=spec))
        return sandbox

    @override
    async def stop(self, sandbox: str, order: StopOrder = ASKED) -> SandboxView:
        self.asked.append(f"stop {sandbox}")
        if self.stuck:
            await self.stuck.wait()
        return await super().stop(sandbox, order)

    @override
    async def pause(self, sandbox: str, order: PauseOrder = PLAIN) -> SandboxView:
        self.asked.append(f"pause {sandbox}")
        return await super().pause(sandbox, order)

    def states(self, *sandboxes: str) -> list[SandboxState]:
        return [self.sandboxes[sandbox].state for sandbox in sandboxes]

    def end(self, sandbox: str) -> tuple[str, str]:
        view = self.sandboxes[sandbox]
        return str(view.stop_reason), view.stop_detail

    def held(self, sandbox: str) -> str:
        pause = self.sandboxes[sandbox].pause
        assert pause is not None
        return pause.held


class World:
    def __init__(self, *nodes: Node, shared: bool = False) -> None:
        self.nodes = nodes or (Node(),)
        self.node = self.nodes[0]
        self.clock = Clock()
        self.book = MemoryLeases(shared=shared)
        self.edges = Edges([Edge(node, node.app) for node in self.nodes], self.clock)
        self.reaper = Reaper(self.edges, self.book, self.clock)
        self.leases = Leases(self.book, self.clock, self.expect)

    def expect(self, due_at: float) -> None:
        self.reaper.expect(due_at)

    @asynccontextmanager
    async def reaping(self) -> AsyncIterator[None]:
        """A run of the control plane; leaving it is a crash."""
        self.reaper = Reaper(self.edges, self.book, self.clock)
        await self.edges.refresh()
        async with anyio.create_task_group() as group:
            group.start_soon(self.reaper.run)
            group.start_soon(self.edges.run)
            yield
            group.cancel_scope.cancel()

    async def hold(self, epoch: int = 0, ttl_s: float = 60.0, **terms: Any) -> Lease:
        return await self.leases.hold(ADA, "run", LeaseRequest(epoch=epoch, ttl_s=ttl_s, **terms))

    async def lease(self) -> Lease:
        lease = await self.book.find(TEAM, "run")
        assert lease is not None
        return lease


async def test_nothing_happens_to_what_is_renewed() -> None:
    world = World()
    sandbox = await world.node.make()
    async with world.reaping():
        await world.hold()
        for _ in range(20):
            await anyio.sleep(59)
            await world.hold(1)
        assert world.node.states(sandbox) == [RUNNING]
        assert world.node.asked == []


async def test_a_lapse_pauses_what_is_of_the_epoch_and_nothing_else() -> None:
    world = World()
    mine = [await world.node.make() for _ in range(40)]
    others = [
        await world.node.make(epoch=0),
        await world.node.make(job="other"),
        await world.node.make(project="foreign"),
    ]
    async with world.reaping():
        await world.hold()
        await anyio.sleep(59)
        assert set(world.node.states(*mine)) == {RUNNING}
        await anyio.sleep(2)
        assert set(world.node.states(*mine)) == {PAUSED}
        assert world.node.states(*others) == [RUNNING] * 3
        assert (await world.lease()).lapsed_at is not None


async def test_a_lapse_reaps_if_it_was_agreed_so_and_cannot_be_undone() -> None:
    world = World()
    sandbox = await world.node.make()
    async with world.reaping():
        await world.hold(on_lapse="reap")
        await anyio.sleep(61)
        assert world.node.states(sandbox) == [STOPPED]
        why = "epoch 1 of job run has lapsed: ada did not renew it in time"
        assert world.node.end(sandbox) == ("lease_lapsed", why)
        with pytest.raises(Conflict) as refused:
            await world.hold(1, on_lapse="pause")
        assert refused.value.details == {
            "kind": "lease",
            "reason": "lapsed",
            "epoch": 1,
            "holder": "ada",
        }


async def test_a_late_renewal_makes_a_lease_good_again_until_it_lapses_again() -> None:
    world = World()
    sandbox = await world.node.make()
    async with world.reaping():
        await world.hold()
        await anyio.sleep(3600)
        assert world.node.states(sandbox) == [PAUSED]
        lease = await world.hold(1)
        assert (lease.epoch, lease.lapsed_at) == (1, None)
        await anyio.sleep(50)
        assert world.node.states(sandbox) == [PAUSED]
        await world.node.resume(sandbox)
        await anyio.sleep(20)
        assert world.node.states(sandbox) == [PAUSED]


async def test_a_new_epoch_reaps_the_older_ones_at_once() -> None:
    world = World()
    first, none = await world.node.make(), await world.node.make(epoch=0)
    async with world.reaping():
        await world.hold()
        await world.hold()
        second = await world.node.make(epoch=2)
        await anyio.sleep(1)
        assert world.node.states(first, second, none) == [STOPPED, RUNNING, RUNNING]
        why = "epoch 1 of job run is superseded: ada has epoch 2"
        assert world.node.end(first) == ("lease_superseded", why)
        with pytest.raises(Conflict, match="epoch 1 of job run is superseded: ada has epoch 2"):
            await world.hold(1)


async def test_older_epochs_are_paused_and_held_once_and_may_be_resumed_then() -> None:
    world = World()
    old, at_rest = await world.node.make(), await world.node.make()
    await world.node.pause(at_rest)
    async with world.reaping():
        await world.hold()
        await world.hold(on_superseded="pause", ttl_s=3600)
        await anyio.sleep(1)
        assert world.node.states(old, at_rest) == [PAUSED, PAUSED]
        why = "epoch 1 of job run is superseded: ada has epoch 2"
        assert (world.node.held(old), world.node.held(at_rest)) == (why, why)
        await world.node.resume(old)
        await anyio.sleep(2 * LATE_S)
        assert world.node.states(old) == [RUNNING]


async def test_what_a_lapse_has_paused_is_held_once_its_epoch_is_superseded() -> None:
    world = World()
    old = await world.node.make()
    async with world.reaping():
        await world.hold()
        await anyio.sleep(61)
        assert (world.node.states(old), world.node.held(old)) == ([PAUSED], "")
        await world.hold(on_superseded="pause", ttl_s=3600)
        await anyio.sleep(1)
        assert "superseded" in world.node.held(old)


async def test_a_second_lapse_soon_after_the_first_pauses_again() -> None:
    world = World()
    sandbox = await world.node.make()
    async with world.reaping():
        await world.hold()
        await anyio.sleep(61)
        await world.hold(1)
        await world.node.resume(sandbox)
        await anyio.sleep(61)
        assert world.node.states(sandbox) == [PAUSED]


async def test_what_was_let_in_just_before_is_found_too() -> None:
    world = World()
    async with world.reaping():
        await world.hold()
        await world.hold(ttl_s=3600)
        await anyio.sleep(LATE_S - 30)
        late = await world.node.make()
        await anyio.sleep(LATE_S)
        assert world.node.states(late) == [STOPPED]
        lease = await world.lease()
        assert not lease.superseding
        assert lease.due_at == lease.expires_at


async def test_a_settled_lapse_is_waited_for_no_more() -> None:
    world = World()
    await world.node.make()
    async with world.reaping():
        await world.hold()
        await anyio.sleep(60 + 2 * LATE_S)
        lease = await world.lease()
        assert (lease.lapsing, lease.due_at) == (False, None)
        assert world.reaper._paused == {}
        assert len(world.node.asked) == 1


async def test_a_node_that_is_away_is_seen_to_when_it_is_back() -> None:
    here, away = Node("n001"), Node("n002")
    world = World(here, away)
    mine, far = await here.make(), await away.make()
    async with world.reaping():
        await world.hold(on_lapse="reap")
        away.away = Unavailable("the edge is away")
        await anyio.sleep(3600)
        assert here.states(mine) == [STOPPED]
        assert away.states(far) == [RUNNING]
        assert (await world.lease()).lapsing
        away.away = None
        await anyio.sleep(301)
        assert away.states(far) == [STOPPED]


async def test_a_node_never_heard_of_is_waited_for() -> None:
    here, away = Node("n001"), Node("n002")
    world = World(here, away)
    far = await away.make()
    away.away = Unavailable("the edge is away")
    async with world.reaping():
        await world.hold(on_lapse="reap")
        await anyio.sleep(3600)
        away.away = None
        await anyio.sleep(301)
        assert away.states(far) == [STOPPED]


async def test_a_crash_between_lapse_and_reap_loses_nothing() -> None:
    world = World()
    sandboxes = [await world.node.make() for _ in range(3)]
    world.node.stuck = anyio.Event()
    async with world.reaping():
        await world.hold(on_lapse="reap")
        await anyio.sleep(61)
        assert len(world.node.asked) == 3
    assert world.node.states(*sandboxes) == [RUNNING] * 3
    world.node.stuck = None
    async with world.reaping():
        await anyio.sleep(1)
        assert world.node.states(*sandboxes) == [STOPPED] * 3


async def test_nobody_lapses_while_nobody_listens() -> None:
    world = World()
    sandbox = await world.node.make()
    async with world.reaping():
        await world.hold()
    await anyio.sleep(3600)
    async with world.reaping():
        await anyio.sleep(29)
        await world.hold(1)
        await anyio.sleep(59)
        assert world.node.states(sandbox) == [RUNNING]
        await anyio.sleep(2)
        assert world.node.states(sandbox) == [PAUSED]


async def test_nor_while_an_older_epoch_is_still_seen_to() -> None:
    world = World()
    world.node.away = Unavailable("the edge is away")
    async with world.reaping():
        await world.hold()
        await world.hold()
    await anyio.sleep(3600)
    async with world.reaping():
        await anyio.sleep(29)
        lease = await world.lease()
        assert (lease.superseding, lease.lapsed_at) == (True, None)
        await world.hold(2)
        await anyio.sleep(50)
        assert (await world.lease()).lapsed_at is None


@pytest.mark.parametrize(("ttl_s", "waits"), [(5.0, 5.0), (60.0, 30.0)])
async def test_it_is_waited_for_as_long_as_a_renewal_may_take(ttl_s: float, waits: float) -> None:
    world = World()
    sandbox = await world.node.make()
    async with world.reaping():
        await world.hold(ttl_s=ttl_s)
    await anyio.sleep(3600)
    async with world.reaping():
        await anyio.sleep(waits - 0.5)
        assert world.node.states(sandbox) == [RUNNING]
        await anyio.sleep(1)
        assert world.node.states(sandbox) == [PAUSED]


async def test_a_clock_set_forward_is_not_held_against_holders() -> None:
    world = World()
    sandbox = await world.node.make()
    async with world.reaping():
        await world.hold(ttl_s=3600)
        await anyio.sleep(100)
        await world.leases.hold(ADA, "other", LeaseRequest(ttl_s=5))
        world.clock.offset += 86400
        await anyio.sleep(20)
        assert world.node.states(sandbox) == [RUNNING]
        await world.hold(1)
        await anyio.sleep(59)
        assert world.node.states(sandbox) == [RUNNING]
        await anyio.sleep(2)
        assert world.node.states(sandbox) == [PAUSED]


async def test_what_cannot_be_paused_is_left_alone() -> None:
    world = World()
    sandbox = await world.node.make()
    world.node.refusal = Unsupported("cannot be frozen")
    async with world.reaping():
        await world.hold()
        await anyio.sleep(60 + 2 * LATE_S)
        assert world.node.states(sandbox) == [RUNNING]
        assert (await world.lease()).due_at is None


async def test_what_is_given_back_goes_on() -> None:
    world = World()
    sandbox = await world.node.make()
    async with world.reaping():
        await world.hold()
        await world.leases.release(ADA, "run", 1)
        await world.leases.release(ADA, "run", 1)
        await anyio.sleep(3600)
        assert world.node.states(sandbox) == [RUNNING]
        with pytest.raises(Conflict, match="released"):
            await world.hold(1)
        with pytest.raises(Conflict, match="epoch 7 of job run is unknown"):
            await world.leases.release(ADA, "run", 7)


async def test_a_lease_taken_through_another_process_is_seen() -> None:
    world = World(shared=True)
    sandbox = await world.node.make()
    elsewhere = Leases(world.book, world.clock, lambda _: None)
    async with world.reaping():
        await anyio.sleep(61)
        await elsewhere.hold(ADA, "run", LeaseRequest(ttl_s=1))
        await anyio.sleep(70)
        assert world.node.states(sandbox) == [PAUSED]


async def test_two_reapers_do_no_harm() -> None:
    world = World(shared=True)
    sandboxes = [await world.node.make() for _ in range(5)]
    async with world.reaping():
        other = Reaper(world.edges, world.book, world.clock)
        async with anyio.create_task_group() as group:
            group.start_soon(other.run)
            await world.hold(on_lapse="reap")
            await anyio.sleep(60 + 2 * LATE_S)
            group.cancel_scope.cancel()
        assert world.node.states(*sandboxes) == [STOPPED] * 5
        assert (await world.lease()).due_at is None


async def test_a_store_that_fails_for_a_while_does_not_end_it() -> None:
    world = World()
    sandbox = await world.node.make()
    reading = [OSError(28, "no space left"), RuntimeError("x")]
    writing = list(reading)
    due, replace = world.book.due, world.book.replace

    async def failing_due(moment: float) -> list[Lease]:
        if reading:
            raise reading.pop()
        return await due(moment)

    async def failing_replace(seen: Lease, wanted: Lease) -> Lease | None:
        if writing:
            raise writing.pop()
        return await replace(seen, wanted)

    async with world.reaping():
        await world.hold()
        world.book.due = failing_due  # type: ignore[method-assign]
        world.book.replace = failing_replace  # type: ignore[method-assign]
        await anyio.sleep(61 + 30)
        assert (reading, writing) == ([], [])
        assert world.node.states(sandbox) == [PAUSED]


async def test_a_renewal_at_the_last_moment_counts() -> None:
    world = World()
    sandbox = await world.node.make()
    book, due = world.book, world.book.due

    async def renewed_meanwhile(moment: float) -> list[Lease]:
        found = await due(moment)
        if found:
            await world.hold(1)
        return found

    async with world.reaping():
        await world.hold()
        book.due = renewed_meanwhile  # type: ignore[method-assign]
        await anyio.sleep(90)
        assert world.node.states(sandbox) == [RUNNING]
        assert (await world.lease()).lapsed_at is None


async def test_a_renewal_during_a_look_does_not_undo_it() -> None:
    world = World()
    old = await world.node.make()

    async with world.reaping():
        await world.hold()
        await world.hold(ttl_s=3600)
        list_sandboxes = world.node.list_sandboxes

        async def renewing(matching: ListFilter) -> list[SandboxView]:
            found = await list_sandboxes(matching)
            await world.hold(2, ttl_s=3600)
            return found

        world.node.list_sandboxes = renewing  # type: ignore[method-assign]
        await anyio.sleep(2 * LATE_S)
        assert world.node.states(old) == [STOPPED]
        assert not (await world.lease()).superseding


async def test_a_renewal_while_a_look_waits_for_its_turn_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaping, "JOBS_AT_ONCE", 1)
    world = World()
    await world.node.make()
    await world.node.make(job="other")
    async with world.reaping():
        await world.hold()
        await world.leases.hold(ADA, "other", LeaseRequest(ttl_s=3600))
        await anyio.sleep(61)
        assert (await world.lease()).lapsing
        world.node.stuck = anyio.Event()
        await world.leases.hold(ADA, "other", LeaseRequest(ttl_s=3600))
        await anyio.sleep(20)  # the next look at the lapsed one waits for the other job's
        await world.hold(1)
        sandbox = await world.node.make()
        world.node.stuck.set()
        await anyio.sleep(5)
        assert world.node.states(sandbox) == [RUNNING]
