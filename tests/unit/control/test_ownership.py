"""What is remembered of sandboxes, and that it is bounded; keys of flights."""

from __future__ import annotations

import anyio
import pytest

from dsec.base.clock import SystemClock
from dsec.base.errors import NotFound
from dsec.base.ids import NodeId, ProjectId, SandboxId, mint_sandbox_id
from dsec.control.edges import Edge, Edges
from dsec.control.listing import _read_mark, _write_mark
from dsec.control.ownership import Ownership
from dsec.kit.flights import Flights
from dsec.wire.edge_v1 import CreateOnEdge
from dsec.wire.sandbox import SandboxSpec, SandboxView
from tests.system.fake_edge import FakeEdge

NODE = NodeId("n001")


class Counting(FakeEdge):
    looks = 0

    async def get(self, sandbox: str) -> SandboxView:  # type: ignore[explicit-override]
        self.looks += 1
        return await super().get(sandbox)


async def made(edge: FakeEdge) -> SandboxId:
    sandbox = mint_sandbox_id(NODE)
    await edge.create(CreateOnEdge(id=sandbox, project="team", spec=SandboxSpec(image="debian")))
    return sandbox


@pytest.mark.anyio
async def test_an_edge_is_asked_once_while_it_is_remembered() -> None:
    edge = Counting()
    edges = Edges([Edge(edge, edge.app)], SystemClock())
    await edges.refresh()
    ownership = Ownership(edges, remembered=2)
    sandboxes = [await made(edge) for _ in range(3)]
    for _ in range(3):
        assert await ownership.project_of(sandboxes[0]) == ProjectId("team")
    assert edge.looks == 1
    await ownership.project_of(sandboxes[1])
    await ownership.project_of(sandboxes[0])
    await ownership.project_of(sandboxes[2])
    assert edge.looks == 3
    await ownership.project_of(sandboxes[0])
    assert edge.looks == 3
    await ownership.project_of(sandboxes[1])
    assert edge.looks == 4
    with pytest.raises(NotFound):
        await ownership.project_of(mint_sandbox_id(NODE))


@pytest.mark.anyio
async def test_flights_take_turns_and_leave_nothing() -> None:
    flights = Flights()
    inside: list[str] = []

    async def fly(key: str) -> None:
        async with flights.alone(key):
            assert key not in inside
            inside.append(key)
            await anyio.lowlevel.checkpoint()
            inside.remove(key)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(fly, "ab"[number % 2])
    assert flights._locks == {}


@pytest.mark.anyio
async def test_a_flight_given_up_lets_the_next_go() -> None:
    flights = Flights()
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            async with flights.alone("a"):
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        group.cancel_scope.deadline = anyio.current_time() + 5
        async with flights.alone("a"):
            assert scope.cancelled_caught
    assert flights._locks == {}


def test_marks_come_back_as_they_were() -> None:
    mark = (-1796050560.166587, "sbxn0010000000000000000")
    assert _read_mark(_write_mark(mark)) == mark
    assert _read_mark("") is None
