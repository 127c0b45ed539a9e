"""What time does to sandboxes that are paused, or are to be when they are idle."""

from __future__ import annotations

import anyio
from msgspec.structs import replace

from dsec.base.states import SandboxState, StopReason
from dsec.edge import commands
from dsec.edge.service import EdgeService
from dsec.wire.sandbox import CommandSpec
from tests.unit.edge.node import Node, request

S = SandboxState


async def until(edge: EdgeService, sandbox: str, state: SandboxState) -> None:
    with anyio.fail_after(10):
        while (await edge.get(sandbox)).state is not state:  # noqa: ASYNC110 - the edge's doing
            await anyio.sleep(0.02)


async def test_an_idle_one_is_paused_again_and_again(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = (await edge.create(request(ttl_running_stop=0.3, idle_action="pause"))).id
        for _ in range(2):
            await until(edge, sandbox, S.PAUSED)
            owner = await edge.owner(sandbox)
            assert owner.state is S.RUNNING
            await commands.run(owner, CommandSpec(argv=["true"]))


async def test_one_at_work_is_not_paused(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = (await edge.create(request(ttl_running_stop=0.2, idle_action="pause"))).id
        owner = await edge.owner(sandbox)
        await commands.run(owner, CommandSpec(argv=["sleep", "0.7"]))
        assert owner.state is S.RUNNING


async def test_a_paused_one_is_not_idle_but_grows_old(node: Node) -> None:
    async with node.edge() as edge:
        asked = request(ttl_running_stop=0.2, max_lifetime_s=1.0)
        sandbox = (await edge.create(asked)).id
        await edge.pause(sandbox)
        await until(edge, sandbox, S.STOPPED)
        view = await edge.get(sandbox)
        assert view.stop_reason is StopReason.LIFETIME


async def test_one_whose_lifetime_ends_while_it_is_being_paused_is_stopped_then(node: Node) -> None:
    async with node.edge() as edge:
        asked = request(ttl_running_stop=0.1, max_lifetime_s=3600.0, idle_action="pause")
        gate = node.faults.hold("reclaim")
        sandbox = (await edge.create(asked)).id
        await until(edge, sandbox, S.PAUSING)
        record = edge._live[sandbox].record
        spec = replace(record.spec, max_lifetime_s=0.001, ttl_running_stop=3600.0)
        edge._live[sandbox].record = replace(record, spec=spec)
        gate.set()
        await until(edge, sandbox, S.STOPPED)
        assert (await edge.get(sandbox)).stop_reason is StopReason.LIFETIME


async def test_its_idle_time_begins_anew_when_it_is_resumed(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = (await edge.create(request(ttl_running_stop=0.3))).id
        await edge.pause(sandbox)
        await anyio.sleep(0.7)  # what is tested is time that passes
        assert (await edge.resume(sandbox)).state is S.RUNNING
        await until(edge, sandbox, S.STOPPED)
        assert (await edge.get(sandbox)).stop_reason is StopReason.IDLE


async def test_one_that_cannot_be_paused_when_idle_runs_on(node: Node) -> None:
    async with node.edge() as edge:
        node.faults.fail_freezes = 1
        sandbox = (await edge.create(request(ttl_running_stop=0.2, idle_action="pause"))).id
        await until(edge, sandbox, S.PAUSED)  # at the second look
        assert node.faults.fail_freezes == 0
