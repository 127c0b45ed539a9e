"""Standing still for somebody: how long, whose time counts meanwhile, and what comes before it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from dsec.base.errors import Conflict, DeadlineExceeded, SandboxGone
from dsec.base.states import SandboxState
from dsec.edge.channel import AetherChannel
from dsec.edge.lifecycle import resting, standing
from dsec.edge.lifecycle.standing import DEADLINE_S
from dsec.kit.blocking import LIMITS
from tests.unit.edge.node import Node
from tests.unit.edge.test_pausing import made, run

S = SandboxState


@pytest.mark.parametrize("paused", [False, True])
async def test_it_stands_still_for_some_seconds_at_most(
    node: Node, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    monkeypatch.setattr(standing, "DEADLINE_S", 0.2)
    async with node.edge() as edge:
        owner = await made(edge)
        if paused:
            await edge.pause(owner.record.id)
        with pytest.raises(Conflict, match="changes too fast"):
            async with owner.still():
                await anyio.sleep(3600)
        assert owner.state is (S.PAUSED if paused else S.RUNNING)
        assert node.host.sandboxes[owner.record.id].frozen is paused
        assert await run(owner, "true") == 0


@pytest.mark.parametrize("paused", [False, True])
async def test_a_stop_does_not_wait_for_what_has_it_stand_still(node: Node, paused: bool) -> None:
    async with node.edge() as edge:
        owner = await made(edge)
        if paused:
            await edge.pause(owner.record.id)
        began, ended = anyio.Event(), anyio.Event()

        async def hold_still() -> None:
            with pytest.raises(SandboxGone, match="stopped"):  # noqa: PT012
                async with owner.still():
                    began.set()
                    await anyio.sleep_forever()
            ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(hold_still)
            await began.wait()
            begun = anyio.current_time()
            assert (await edge.stop(owner.record.id)).state is S.STOPPED
            assert anyio.current_time() - begun < DEADLINE_S / 2
            await ended.wait()


async def test_what_comes_before_a_stop_that_waits_does_not_begin(node: Node) -> None:
    async with node.edge() as edge, anyio.create_task_group() as group:
        owner = await made(edge)
        gate = node.faults.hold("reclaim")
        group.start_soon(edge.pause, owner.record.id)
        await anyio.wait_all_tasks_blocked()

        async def hold_still() -> None:
            with pytest.raises(SandboxGone):
                async with owner.still():
                    await anyio.sleep_forever()

        group.start_soon(hold_still)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(edge.stop, owner.record.id)
        await anyio.wait_all_tasks_blocked()
        begun = anyio.current_time()
        gate.set()
        await owner.over.wait()
        assert anyio.current_time() - begun < DEADLINE_S / 2


async def test_nobodys_time_counts_while_it_stands_still(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def heard(name: str) -> Callable[[AetherChannel], Awaitable[None]]:
        really = getattr(resting, name)

        async def tell(channel: AetherChannel) -> None:
            told.append(name)
            await really(channel)

        return tell

    for name in ("hold", "release"):
        monkeypatch.setattr(resting, name, heard(name))
    async with node.edge() as edge:
        owner = await made(edge)
        async with owner.use(0.5, "it"):  # aether is told, and so is whoever waits here
            async with owner.still():
                await anyio.sleep(1)
        assert told == ["hold", "release"]
        with pytest.raises(ZeroDivisionError):
            async with owner.still():
                raise ZeroDivisionError
        assert told == ["hold", "release"] * 2
        with pytest.raises(DeadlineExceeded):
            async with owner.use(0.01, "it"):
                await anyio.sleep(3600)


async def test_who_waits_to_be_paused_runs_on(node: Node) -> None:
    async with node.edge() as edge, anyio.create_task_group() as group:
        owners = [await made(edge) for _ in range(LIMITS["reclaim"] + 1)]
        gate = node.faults.hold("reclaim")
        for owner in owners:
            group.start_soon(edge.pause, owner.record.id)
            await anyio.wait_all_tasks_blocked()
        *_, last = owners
        assert (last.state, node.host.sandboxes[last.record.id].frozen) == (S.RUNNING, False)
        assert await run(last, "true") == 0
        gate.set()
        with anyio.fail_after(60):
            while last.state is not S.PAUSED:
                await anyio.wait_all_tasks_blocked()
        assert [owner.state for owner in owners] == [S.PAUSED] * len(owners)
