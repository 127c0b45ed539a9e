"""Resizing on a real edge: what the kernel is told, and what is left of it after kill -9."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from dsec.wire.sandbox import Limits
from tests.kernel.test_edge import Edge, aether, anyio_backend, edge, groups, store

__all__ = ["aether", "anyio_backend", "edge", "store"]
pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]
MIB = 1 << 20
WORK = "work"


async def resize(edge: Edge, sandbox: str, **change: Any) -> dict[str, Any]:
    answer = await edge.http.patch(f"/v1/sandboxes/{sandbox}", json=change)
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


def kernel(sandbox: str, *names: str) -> str:
    """The first of these files that one of the sandbox's groups has."""
    for group in groups():
        for path in Path(group).glob(f"{sandbox}"), Path(group).glob(f"{sandbox}/work"):
            for directory in path:
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        return (directory / name).read_text().strip()
    raise AssertionError(f"no {names} of {sandbox}")


def memory_limit(sandbox: str) -> int:
    return int(kernel(sandbox, "memory.limit_in_bytes", "memory.max"))


def processors(sandbox: str) -> set[int]:
    """On how many what it runs may run."""
    found = set()
    for group in groups():
        for file in Path(group).glob(f"{sandbox}/{WORK}/**/cgroup.procs"):
            pids = file.read_text().split()
            found |= {len(os.sched_getaffinity(int(pid))) for pid in pids}
    return found


async def test_the_kernel_holds_what_is_told(edge: Edge) -> None:
    sandbox = await edge.create()
    assert kernel(sandbox, "cpu.idle") == "0"
    view = await resize(edge, sandbox, memory_mb=128, pids=64, cpu_cores=0.25, qos="be")
    assert view["qos"] == "be"
    assert memory_limit(sandbox) == 128 * MIB
    assert kernel(sandbox, "pids.max") == "64"
    assert kernel(sandbox, "cpu.cfs_quota_us", "cpu.max").split()[0] == "25000"
    assert kernel(sandbox, "cpu.idle") == "1"
    await resize(edge, sandbox, qos="ls")
    assert kernel(sandbox, "cpu.idle") == "0"


async def test_best_effort_from_the_start(edge: Edge) -> None:
    sandbox = await edge.create(qos="be")
    assert kernel(sandbox, "cpu.idle") == "1"
    assert (await edge.view(sandbox))["qos"] == "be"


async def test_all_that_runs_moves_to_its_processors(edge: Edge) -> None:
    sandbox = await edge.create(limits=Limits(memory_mb=64, cpu_cores=2, pids=32))
    body = {"argv": ["/probe", "sleep", "60"]}
    await edge.http.post(f"/v1/sandboxes/{sandbox}/commands", json=body)
    assert processors(sandbox) == {min(2, len(os.sched_getaffinity(0)))}
    await resize(edge, sandbox, cpu_cores=1)
    assert processors(sandbox) == {1}


async def test_kill_9_keeps_the_limits(edge: Edge) -> None:
    sandbox = await edge.create()
    await resize(edge, sandbox, memory_mb=128, qos="be")
    edge.kill()
    await edge.start()
    view = await edge.view(sandbox)
    assert (view["limits"]["memory_mb"], view["qos"]) == (128, "be")
    assert memory_limit(sandbox) == 128 * MIB
    assert (await edge.run(sandbox, "alloc", "96"))["exit_code"] == 0
