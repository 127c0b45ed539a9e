"""Kill the edge after every journal write of a pause, a resume and a moment of standing still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec.base.states import SandboxState
from dsec.edge import commands
from dsec.edge.service import EdgeService
from dsec.edge.sim import SimBackend
from dsec.wire.sandbox import CommandSpec
from tests.faults.killing import Killed, only_killed, without_threads
from tests.unit.edge.node import Node, request

S = SandboxState
Life = Callable[[EdgeService, str], Any]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    without_threads(monkeypatch, "service", "lifecycle.owner", "sweep")
    return Node(tmp_path)


async def pause(edge: EdgeService, sandbox: str) -> None:
    await edge.pause(sandbox)


async def pause_and_resume(edge: EdgeService, sandbox: str) -> None:
    await edge.pause(sandbox)
    await edge.resume(sandbox)


async def stand_still(edge: EdgeService, sandbox: str) -> None:
    async with (await edge.owner(sandbox)).still():
        pass


async def live(node: Node, life: Life, kill_at: int) -> tuple[str, int, bool]:
    """A sandbox's life on an edge that is killed at its n-th journal write after the creation.

    Returns its id, how many writes there were, and whether the caller was told of its end.
    """
    asked, writes, told, armed = request(), 0, False, False

    def after_write(_number: int) -> None:
        nonlocal writes
        writes += armed
        if armed and writes == kill_at:
            raise Killed

    try:
        async with node.edge(after_write=after_write) as edge:
            await edge.create(asked)
            armed = True
            await life(edge, asked.id)
            told, armed = True, False
    except BaseException as exc:
        if not only_killed(exc):
            raise
    return asked.id, writes, told


@pytest.mark.parametrize(
    ("life", "least", "after"),
    [
        (pause, 2, {S.RUNNING, S.PAUSED}),
        (pause_and_resume, 4, {S.RUNNING, S.PAUSED}),
        (stand_still, 2, {S.RUNNING}),
    ],
)
async def test_a_killed_edge_finds_it_as_it_is_told(
    node: Node, life: Life, least: int, after: set[SandboxState]
) -> None:
    async with node.host.running():
        _, total, told = await live(node, life, kill_at=0)
        assert told
        assert total >= least
        seen = set()
        for kill_at in range(1, total + 1):
            sandbox, writes, told = await live(node, life, kill_at)
            assert (writes, told) == (kill_at, False)
            seen.add(await check(node, sandbox))
        assert seen == after


async def check(node: Node, sandbox: str) -> SandboxState:
    """What the next edge says of it is true, and holds for the one after it; then it works, and ends."""
    async with node.edge() as edge:
        state = (await edge.get(sandbox)).state
        assert node.host.sandboxes[sandbox].frozen == (state is S.PAUSED)
    async with node.edge() as edge:
        view = await edge.get(sandbox)
        assert view.state is state
        assert (view.pause is not None) == (state is S.PAUSED)
        ended = await commands.run(await edge.owner(sandbox), CommandSpec(argv=["true"]))
        assert ended.exit_code == 0
        await edge.stop(sandbox)
    assert sandbox not in node.host.sandboxes
    return state


@pytest.mark.parametrize("step", ["freeze", "reclaim", "thaw", "refill"])
async def test_killed_in_the_middle_of_a_step(
    node: Node, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def killed(*_: object) -> None:
        raise Killed

    async def killed_in_it(edge: EdgeService, sandbox: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(SimBackend, step, killed)
            await pause_and_resume(edge, sandbox)
            await anyio.sleep_forever()

    async with node.host.running():
        sandbox, _, told = await live(node, killed_in_it, kill_at=0)
        assert not told
        assert node.host.sandboxes[sandbox].frozen == (step in ("reclaim", "thaw"))
        assert await check(node, sandbox) is S.RUNNING


async def test_a_pause_that_cannot_be_written_down_does_not_happen(node: Node) -> None:
    async with node.host.running():
        full = False

        def after_write(_number: int) -> None:
            if full:
                raise OSError(28, "No space left on device")

        async with node.edge(after_write=after_write) as edge:
            asked = request()
            await edge.create(asked)
            full = True
            with pytest.raises(Exception, match=r"full|room|space"):
                await edge.pause(asked.id)
            full = False
            assert (await edge.get(asked.id)).state is S.RUNNING
            assert not node.host.sandboxes[asked.id].frozen
            await edge.pause(asked.id)
            full = True
            assert (await edge.resume(asked.id)).state is S.RUNNING
            full = False
            await edge.stop(asked.id)
