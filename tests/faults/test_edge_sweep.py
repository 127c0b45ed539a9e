"""Kill the edge after every journal write of a sandbox's life, start it again, look what is left."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec.base.errors import NotFound, SandboxGone
from dsec.base.states import SandboxState, StopReason
from dsec.edge.lifecycle.journal import Journal
from dsec.wire.edge_v1 import ASKED, CreateOnEdge, StopOrder
from tests.faults.killing import Killed, only_killed, without_threads
from tests.unit.edge.node import Node, request


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    without_threads(monkeypatch, "service", "lifecycle.owner", "sweep")
    return Node(tmp_path)


async def live_and_die(
    node: Node, asked: CreateOnEdge, kill_at: int, order: StopOrder = ASKED
) -> tuple[int, str]:
    """Create and stop a sandbox on an edge that is killed at its n-th journal write.

    Returns how many writes there were, and the last thing the caller was told.
    """
    writes, told = 0, ""

    def after_write(_number: int) -> None:
        nonlocal writes
        writes += 1
        if writes == kill_at:
            raise Killed

    try:
        async with node.edge(after_write=after_write) as edge:
            await edge.create(asked)
            told = "created"
            await edge.stop(asked.id, order)
            told = "stopped"
    except BaseException as exc:
        if not only_killed(exc):
            raise
    return writes, told


def leftovers(node: Node) -> dict[str, object]:
    journal = Journal(node.root / "state")
    return {
        "directories": list(journal.sandboxes.iterdir()),
        "trash": list(journal.trash.iterdir()),
        "half-written": list(journal.ended.glob(".*")),
        "sandboxes": list(node.host.sandboxes),
    }


NOTHING: dict[str, object] = {
    "directories": [],
    "trash": [],
    "half-written": [],
    "sandboxes": [],
}


async def count_writes(node: Node) -> int:
    async with node.host.running():
        writes, told = await live_and_die(node, request(), kill_at=0)
    assert told == "stopped"
    return writes


async def test_killed_after_every_write_nothing_is_left_and_nothing_is_forgotten(
    node: Node,
) -> None:
    total = await count_writes(node)
    assert total >= 9
    fates = set()
    for kill_at in range(1, total + 1):
        async with node.host.running():
            asked = request()
            writes, told = await live_and_die(node, asked, kill_at)
            assert writes == kill_at
            async with node.edge() as edge:
                fates.add(await _check_and_remove(edge, asked, told))
                await anyio.wait_all_tasks_blocked()
            assert leftovers(node) == NOTHING, f"killed after write {kill_at}"
    assert fates == {"forgotten", "running", "over"}


async def _check_and_remove(edge: Any, asked: CreateOnEdge, told: str) -> str:
    """A caller's view after the restart must fit what it was told before."""
    known = {view.id: view for view in await edge.list_sandboxes(_everything())}
    view = known.get(asked.id)
    if view is None:
        assert told == "", "a sandbox its caller knew of was forgotten"
        assert (await edge.create(asked)).state is SandboxState.RUNNING
        await edge.stop(asked.id)
        return "forgotten"
    if view.state is SandboxState.RUNNING:
        assert told != "stopped"
        assert (await edge.create(asked)).id == asked.id
        await edge.stop(asked.id)
        return "running"
    assert (view.state, view.stop_reason) == (SandboxState.STOPPED, StopReason.REQUESTED)
    with pytest.raises(SandboxGone):
        await edge.owner(asked.id)
    return "over"


def _everything() -> Any:
    from dsec.wire.edge_v1 import ListFilter

    return ListFilter()


async def test_why_it_was_stopped_is_known_whenever_the_edge_was_killed(node: Node) -> None:
    order = StopOrder(reason=StopReason.REAPED, detail="epoch 3 of job run: ada asked")
    seen = 0
    for kill_at in range(1, await count_writes(node) + 1):
        async with node.host.running():
            asked = request()
            await live_and_die(node, asked, kill_at, order)
            async with node.edge() as edge:
                with contextlib.suppress(NotFound):  # or it was never known of
                    await edge.stop(asked.id, order)
                    view = await edge.get(asked.id)
                    assert (view.stop_reason, view.stop_detail) == (order.reason, order.detail)
                    seen += 1
    assert seen > 1


async def test_killed_again_and_again_while_it_sweeps(node: Node) -> None:
    async with node.host.running():
        asked = request()
        await live_and_die(node, asked, kill_at=4)
        for kill_at in (1, 1, 2, 2, 3):
            writes = 0

            def after_write(_number: int, at: int = kill_at) -> None:
                nonlocal writes
                writes += 1
                if writes == at:
                    raise Killed

            with contextlib.suppress(BaseException):
                async with node.edge(after_write=after_write):
                    pass
        async with node.edge():
            await anyio.wait_all_tasks_blocked()
        assert leftovers(node) == NOTHING


async def test_what_no_journal_knows_is_removed(node: Node) -> None:
    async with node.host.running():
        asked = request()
        async with node.edge() as edge:
            await edge.create(asked)
        Journal(node.root / "state").discard(asked.id)
        async with node.edge() as edge:
            assert await edge.list_sandboxes(_everything()) == []
        assert node.host.sandboxes == {}


async def test_a_record_nobody_can_read_is_kept_for_a_person(node: Node) -> None:
    async with node.host.running():
        asked = request()
        async with node.edge() as edge:
            await edge.create(asked)
        record = node.root / "state" / "sandboxes" / asked.id / "record.json"
        record.write_text("{}")
        async with node.edge() as edge:
            assert await edge.list_sandboxes(_everything()) == []
        assert record.exists()
        assert asked.id in node.host.sandboxes
