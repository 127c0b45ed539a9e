"""What is said of a sandbox that refuses an order because it is over, or nearly."""

from __future__ import annotations

import pytest
from typing_extensions import override

from dsec.base.clock import SystemClock
from dsec.base.errors import SandboxGone
from dsec.base.ids import NodeId, mint_sandbox_id, sandbox_id
from dsec.base.states import SandboxState
from dsec.control.edges import Edge, Edges
from dsec.control.members import Order, Verb, carried_out
from dsec.wire.edge_v1 import ASKED, PLAIN, CreateOnEdge, PauseOrder, StopOrder
from dsec.wire.public_v1 import JobItem
from dsec.wire.sandbox import SandboxSpec, SandboxView
from tests.system.fake_edge import FakeEdge

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Over(FakeEdge):
    """Nothing can be done to its sandboxes any more."""

    state = SandboxState.STOPPED

    async def _refused(self, sandbox: str) -> SandboxView:
        self.sandboxes[sandbox].state = self.state
        raise SandboxGone(f"{sandbox} is over", reason="requested")

    @override
    async def stop(self, sandbox: str, order: StopOrder = ASKED) -> SandboxView:
        return await self._refused(sandbox)

    @override
    async def pause(self, sandbox: str, order: PauseOrder = PLAIN) -> SandboxView:
        return await self._refused(sandbox)


async def told(state: SandboxState, verb: Verb) -> JobItem:
    edge = Over("n001")
    edge.state = state
    edges = Edges([Edge(edge, edge.app)], SystemClock())
    await edges.refresh()
    sandbox = mint_sandbox_id(NodeId("n001"))
    spec = SandboxSpec(image="debian", backend="sim")
    await edge.create(CreateOnEdge(id=sandbox, project="p", spec=spec))
    async with carried_out(edges, [Order(sandbox_id(sandbox), verb)]) as items:
        (item,) = [item async for item in items]
    return item


@pytest.mark.parametrize("verb", ["pause", "reap"])
async def test_one_that_is_over_needs_nothing(verb: Verb) -> None:
    item = await told(SandboxState.STOPPED, verb)
    assert (item.error, item.sandbox and item.sandbox.state) == (None, SandboxState.STOPPED)


@pytest.mark.parametrize("verb", ["pause", "reap"])
async def test_one_of_which_something_is_left_is_not_done_with(verb: Verb) -> None:
    item = await told(SandboxState.STOPPING, verb)
    assert item.error is not None
    assert item.error.code == SandboxGone.code
