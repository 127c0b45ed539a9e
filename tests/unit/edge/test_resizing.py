"""Live resize on a simulated host: all or nothing, in every state, and what a crash leaves."""

from __future__ import annotations

import errno
import os
from typing import Any

import msgspec
import pytest

from dsec.base.errors import Conflict, InternalError, InvalidRequest, SandboxGone
from dsec.base.states import SandboxState
from dsec.edge import commands
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.record import Changed
from dsec.edge.service import EdgeService
from dsec.wire.sandbox import CommandSpec, Limits, Resize, SandboxView
from tests.unit.edge.dying import Death, Killed
from tests.unit.edge.node import Node, request

LIMITS = Limits(memory_mb=64, cpu_cores=1, pids=32)


async def made(edge: EdgeService, **spec: object) -> str:
    return (await edge.create(request(**{"limits": LIMITS, **spec}))).id


def shown(view: SandboxView) -> tuple[int, float, int, str]:
    limits = view.limits
    return limits.memory_mb, limits.cpu_cores, limits.pids, view.qos


async def alloc(owner: Owner, size_mb: int) -> int | None:
    spec = CommandSpec(argv=["/probe", "alloc", str(size_mb)])
    return (await commands.run(owner, spec)).exit_code


async def test_what_is_named_changes_and_the_rest_stays(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge)
        assert shown(await edge.resize(sandbox, Resize(memory_mb=128))) == (128, 1, 32, "ls")
        view = await edge.resize(sandbox, Resize(cpu_cores=0.5, pids=64, qos="be"))
        assert shown(view) == (128, 0.5, 64, "be")
        assert await alloc(await edge.owner(sandbox), 100) == 0
        await edge.resize(sandbox, Resize(memory_mb=32))
        assert await alloc(await edge.owner(sandbox), 100) == 137


async def test_more_than_the_node_has_is_said_or_refused(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge)
        with pytest.raises(InvalidRequest, match="the node has"):
            await edge.resize(sandbox, Resize(memory_mb=4 << 20))
        assert shown(await edge.get(sandbox)) == (64, 1, 32, "ls")


async def test_a_disk_only_grows_and_only_where_there_is_one(node: Node) -> None:
    async with node.edge() as edge:
        without = await made(edge)
        with pytest.raises(InvalidRequest, match="without a limit"):
            await edge.resize(without, Resize(disk_mb=64))
        sandbox = await made(edge, limits=msgspec.structs.replace(LIMITS, disk_mb=64))
        with pytest.raises(InvalidRequest, match="smaller"):
            await edge.resize(sandbox, Resize(disk_mb=32))
        assert (await edge.resize(sandbox, Resize(disk_mb=128))).limits.disk_mb == 128


async def test_what_fails_changes_nothing(node: Node) -> None:
    async with node.host.running():
        await fails_and_restarts(node)


async def fails_and_restarts(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge)
        node.faults.fail_resizes = 1
        with pytest.raises(InternalError):
            await edge.resize(sandbox, Resize(memory_mb=16, pids=64))
        assert shown(await edge.get(sandbox)) == (64, 1, 32, "ls")
        assert await alloc(await edge.owner(sandbox), 32) == 0
    async with node.edge() as edge:
        assert shown(await edge.get(sandbox)) == (64, 1, 32, "ls")


async def test_what_cannot_be_noted_either_is_not_what_is_said(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, change = list[object](), Journal.change

    def once(journal: Journal, sandbox: str, changed: Changed) -> None:
        noted.append(changed)
        if len(noted) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        change(journal, sandbox, changed)

    async with node.edge() as edge:
        sandbox = await made(edge)
        node.faults.fail_resizes = 1
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "change", once)
            with pytest.raises(InternalError, match="could not be changed"):
                await edge.resize(sandbox, Resize(memory_mb=16))
        assert len(noted) == 2
        assert shown(await edge.get(sandbox)) == (64, 1, 32, "ls")
        assert node.host.sandboxes[sandbox].table.memory_limit_bytes == 64 << 20


async def test_limits_that_cannot_be_noted_at_the_start_are_those_of_before(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with node.host.running():
        sandbox = await killed_while_resizing(node, 2)
        before = node.host.sandboxes[sandbox].table.memory_limit_bytes
        monkeypatch.setattr(Journal, "change", broken)
        async with node.edge() as edge:
            assert before == 64 << 20
            assert (await edge.get(sandbox)).limits.memory_mb == 64
            assert node.host.sandboxes[sandbox].table.memory_limit_bytes == before


async def test_less_than_it_uses_is_a_conflict_with_numbers(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge)
        table = node.host.sandboxes[sandbox].table
        owner = await edge.owner(sandbox)
        started = await commands.start(owner, CommandSpec(argv=["sleep", "1000"]))
        (process,) = table.living.values()
        table.allocate(process, 40 << 20)
        with pytest.raises(Conflict) as caught:
            await edge.resize(sandbox, Resize(memory_mb=16))
        assert caught.value.details["asked_mb"] == 16
        assert int(str(caught.value.details["used_mb"])) >= 40
        assert table.memory_limit_bytes == 64 << 20
        assert started.command_id


async def test_a_paused_one_is_resized_and_stays_paused(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge)
        await edge.pause(sandbox)
        view = await edge.resize(sandbox, Resize(memory_mb=128))
        assert (view.state, view.limits.memory_mb) == (SandboxState.PAUSED, 128)
        assert node.host.sandboxes[sandbox].table.memory_limit_bytes == 128 << 20


async def test_one_that_is_over_is_gone(node: Node) -> None:
    async with node.edge() as edge:
        sandbox = await made(edge)
        owner = await edge.owner(sandbox)
        await edge.stop(sandbox)
        with pytest.raises(SandboxGone):
            await edge.resize(sandbox, Resize(memory_mb=128))
        with pytest.raises(SandboxGone):
            await owner.change(_never)


async def _never(*_: object) -> Any:
    raise AssertionError("it is over")


async def test_a_restarted_edge_has_the_last_limits(node: Node) -> None:
    async with node.host.running():
        async with node.edge() as edge:
            sandbox = await made(edge)
            await edge.resize(sandbox, Resize(memory_mb=128, qos="be"))
            await edge.resize(sandbox, Resize(pids=64))
        async with node.edge() as edge:
            assert (await edge.get(sandbox)).state is SandboxState.RUNNING
            assert shown(await edge.get(sandbox)) == (128, 1, 64, "be")


async def killed_while_resizing(node: Node, write: int) -> str:
    """A sandbox of 64 MiB whose edge died at some write while it was to be given 128."""
    death, sandboxes = Death(), list[str]()

    async def live() -> None:
        async with node.edge(after_write=death) as edge:
            sandboxes.append(await made(edge))
            death.left = write
            await edge.resize(sandboxes[0], Resize(memory_mb=128))

    with pytest.raises(BaseExceptionGroup) as caught:
        await live()
    assert caught.group_contains(Killed)
    return sandboxes[0]


@pytest.mark.parametrize("write", range(1, 5))
async def test_an_edge_killed_after_any_write_tells_the_truth(node: Node, write: int) -> None:
    """Before or after, and what is told is what holds."""
    async with node.host.running():
        sandbox = await killed_while_resizing(node, write)
        async with node.edge() as edge:
            told = (await edge.get(sandbox)).limits.memory_mb
            assert told == (64 if write == 1 else 128)
            assert node.host.sandboxes[sandbox].table.memory_limit_bytes == told << 20


async def test_limits_that_cannot_be_had_again_are_those_of_before(node: Node) -> None:
    async with node.host.running():
        sandbox = await killed_while_resizing(node, 2)
        node.faults.fail_resizes = 1
        async with node.edge() as edge:
            assert shown(await edge.get(sandbox)) == (64, 1, 32, "ls")
            assert node.host.sandboxes[sandbox].table.memory_limit_bytes == 64 << 20
