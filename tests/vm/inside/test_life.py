"""The whole life of container sandboxes on a host with one v2 hierarchy, through the edge. In a guest.

Most of it are the very tests of `tests/kernel`, with one edge for all of them: to start one takes
seconds without KVM.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.linux.cgroup import detect, files
from dsec.wire.sandbox import Limits
from tests.kernel.test_edge import (
    NODE,
    Edge,
    aether,
    aethers,
    groups,
    store,
    test_a_command_over_its_memory_is_killed_and_says_so,
    test_a_command_runs_as_nobody_of_the_host,
    test_a_fork_bomb_meets_its_limit_and_ends_whole,
    test_kill_9_of_the_edge_loses_nothing,
)
from tests.kernel.test_edge_pausing import (
    test_a_killed_edge_finds_it_paused_and_wakes_it,
    test_a_stop_ends_what_is_frozen,
    test_its_memory_goes_to_swap_and_comes_back,
    test_killed_by_the_host_while_paused_it_is_told,
    test_paused_it_is_frozen_and_the_next_request_has_it_go_on,
)

__all__ = [
    "aether",
    "store",
    "test_a_command_over_its_memory_is_killed_and_says_so",
    "test_a_command_runs_as_nobody_of_the_host",
    "test_a_fork_bomb_meets_its_limit_and_ends_whole",
    "test_a_killed_edge_finds_it_paused_and_wakes_it",
    "test_a_stop_ends_what_is_frozen",
    "test_its_memory_goes_to_swap_and_comes_back",
    "test_kill_9_of_the_edge_loses_nothing",
    "test_killed_by_the_host_while_paused_it_is_told",
    "test_paused_it_is_frozen_and_the_next_request_has_it_go_on",
]
pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]
MIB = 1 << 20
LIVE = ("running", "paused")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def started(store: Path, aether: Path) -> AsyncIterator[Edge]:
    """One edge; when it has ended, nothing of it is left."""
    edge = Edge(store, aether)
    await edge.start()
    try:
        yield edge
    finally:
        await edge.close()
    assert groups() == []
    assert list((store / "run").iterdir()) == []


@pytest.fixture
async def edge(started: Edge) -> AsyncIterator[Edge]:
    """The edge; what a test has made is gone after it, down to the last group and process."""
    yield started
    for sandbox, view in (await started.listed()).items():
        if view["state"] in LIVE:
            await started.stop(sandbox)
    assert [Path(path).name for path in groups()] == [f"dsec-{NODE}"]
    assert aethers() == []


def work(sandbox: str) -> Path:
    return detect.detect(NODE).v2_base() / sandbox / "work"


def bounds(sandbox: str) -> dict[str, str]:
    names = ("memory.max", "memory.swap.max", "cpu.max", "pids.max")
    return {name: (work(sandbox) / name).read_text().strip() for name in names}


async def told_memory_mib(edge: Edge, sandbox: str) -> int:
    """What a program in it believes the machine has."""
    path = f"/v1/sandboxes/{sandbox}/files?path=/proc/meminfo"
    first = (await edge.http.get(path)).text.split()
    assert first[0] == "MemTotal:"
    return int(first[1]) >> 10


async def test_its_limits_are_those_of_v2(edge: Edge) -> None:
    sandbox = await edge.create(limits=Limits(memory_mb=128, cpu_cores=0.5, pids=24))
    assert bounds(sandbox) == {
        "memory.max": str(128 * MIB),
        "memory.swap.max": "0",
        "cpu.max": "50000 100000",
        "pids.max": "24",
    }
    assert await told_memory_mib(edge, sandbox) == 128
    await edge.run(sandbox, "forkbomb", "200", timeout_s=1.0)
    assert files.keyed(work(sandbox) / "pids.events")["max"] > 0


async def test_other_limits_hold_at_once(edge: Edge) -> None:
    sandbox = await edge.create(limits=Limits(memory_mb=64, cpu_cores=0.5, pids=24))
    assert (await edge.run(sandbox, "alloc", "100"))["oom_killed"]
    change = {"memory_mb": 192, "cpu_cores": 1.5, "pids": 40}
    answer = await edge.http.patch(f"/v1/sandboxes/{sandbox}", json=change)
    assert answer.status_code == 200, answer.text
    assert bounds(sandbox) == {
        "memory.max": str(192 * MIB),
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "pids.max": "40",
    }
    assert await told_memory_mib(edge, sandbox) == 192
    assert (await edge.run(sandbox, "alloc", "100"))["exit_code"] == 0
