"""Sandboxes with disks of their own, on a real edge: full, restarted, killed amid creations."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import anyio
import httpx
import pytest

from dsec.base.ids import NodeId, mint_sandbox_id
from dsec.linux import mounts
from dsec.wire.sandbox import Limits
from tests.kernel.test_edge import NODE, Edge, aether, anyio_backend, edge, store, text

__all__ = ["aether", "anyio_backend", "edge", "store"]
pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]
MIB = 1 << 20
PROMPT_S = 10.0
LIMITS = Limits(memory_mb=64, cpu_cores=1, pids=32, disk_mb=64)


def attached(edge: Edge) -> list[str]:
    """Disks of this edge that are loop devices now."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(backing.read_text().strip())
    return [name for name in found if name.startswith(str(edge.home))]


async def no_device_of(edge: Edge) -> None:
    """A device goes with the last mount namespace that has it, a moment after the sandbox."""
    with anyio.fail_after(PROMPT_S):
        while attached(edge):  # noqa: ASYNC110 - the kernel tells nobody
            await anyio.sleep(0.01)


def sandboxes_with_disks(edge: Edge) -> set[str]:
    found = mounts.mounts_under(edge.home / "state/sandboxes")
    return {Path(mount.target).parent.name for mount in found}


async def test_a_full_disk_is_told_and_the_sandbox_goes_on(edge: Edge) -> None:
    sandbox = await edge.create(limits=LIMITS)
    place = f"/v1/sandboxes/{sandbox}"
    for name in "abc":
        answer = await edge.http.put(f"{place}/files?path=/{name}", content=os.urandom(20 * MIB))
        assert answer.status_code == 200, answer.text
    answer = await edge.http.put(f"{place}/files?path=/d", content=os.urandom(20 * MIB))
    assert answer.json()["error"]["code"] == "storage_full"
    assert text((await edge.run(sandbox, "echo", "alive"))["stdout"]) == "alive\n"
    usage = (await edge.http.get(f"{place}/usage")).json()
    assert usage["disk_limit_bytes"] == 64 * MIB
    assert 60 * MIB <= usage["disk_bytes"] < 62 * MIB
    assert (await edge.http.delete(f"{place}/files?path=/a")).status_code < 300
    answer = await edge.http.put(f"{place}/files?path=/d", content=os.urandom(20 * MIB))
    assert answer.status_code == 200, answer.text


async def test_kill_9_of_the_edge_keeps_the_disk(edge: Edge) -> None:
    sandbox = await edge.create(limits=LIMITS)
    files = f"/v1/sandboxes/{sandbox}/files?path=/kept"
    await edge.http.put(files, content=b"kept")
    edge.kill()
    await edge.start()
    assert (await edge.http.get(files)).content == b"kept"
    await edge.stop(sandbox)
    await no_device_of(edge)


async def test_kill_9_amid_creations_leaves_no_disk(edge: Edge) -> None:
    for delay in (0.02, 0.05, 0.1):
        asked = [mint_sandbox_id(NodeId(NODE)) for _ in range(20)]

        async def create(sandbox: str) -> None:
            with contextlib.suppress(httpx.TransportError):
                await edge.create(sandbox, limits=LIMITS)

        async with anyio.create_task_group() as group:
            for sandbox in asked:
                group.start_soon(create, sandbox)
            await anyio.sleep(delay)
            edge.kill()
        await edge.start()
        listed = await edge.listed()
        live = {sandbox for sandbox in asked if listed.get(sandbox, {}).get("state") == "running"}
        assert sandboxes_with_disks(edge) == live
        for sandbox in live:
            assert (await edge.run(sandbox, "exit", "5"))["exit_code"] == 5
            await edge.stop(sandbox)
        await no_device_of(edge)


async def test_a_burst_gets_its_disks_and_gives_them_back(edge: Edge) -> None:
    made: list[str] = []

    async def create() -> None:
        made.append(await edge.create(limits=LIMITS))

    async with anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(create)
    assert sandboxes_with_disks(edge) == set(made)
    async with anyio.create_task_group() as group:
        for sandbox in made:
            group.start_soon(edge.stop, sandbox)
    assert sandboxes_with_disks(edge) == set()
    await no_device_of(edge)
