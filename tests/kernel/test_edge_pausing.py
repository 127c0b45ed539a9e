"""Real containers paused by a real edge: what runs goes on, what is held is given back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from bench.swap import swap
from dsec.linux.cgroup import freezing, groups
from dsec.linux.cgroup.detect import detect
from dsec.wire.sandbox import Limits
from tests.kernel.test_edge import NODE, Edge, aether, anyio_backend, edge, store, text

__all__ = ["aether", "anyio_backend", "edge", "store"]
pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]

SIZE_MB = 48
HELD_S = 6.0


async def change(edge: Edge, sandbox: str, what: str) -> dict[str, object]:
    answer = await edge.http.post(f"/v1/sandboxes/{sandbox}/{what}")
    assert answer.status_code == 200, answer.text
    view: dict[str, object] = answer.json()
    return view


def frozen(sandbox: str) -> bool:
    return freezing.frozen(detect(NODE), sandbox)


async def start(edge: Edge, sandbox: str, *argv: str, **more: object) -> None:
    body = {"argv": ["/probe", *argv], **more}
    answer = await edge.http.post(f"/v1/sandboxes/{sandbox}/commands", json=body)
    assert answer.status_code == 201, answer.text


async def result(edge: Edge, sandbox: str, command: str) -> dict[str, object]:
    answer = await edge.http.get(f"/v1/sandboxes/{sandbox}/commands/{command}/result")
    assert answer.status_code == 200, answer.text
    got: dict[str, object] = answer.json()
    return got


async def test_paused_it_is_frozen_and_the_next_request_has_it_go_on(edge: Edge) -> None:
    sandbox = await edge.create()
    view = await change(edge, sandbox, "pause")
    assert view["state"] == "paused"
    assert frozen(sandbox)
    assert (await edge.view(sandbox))["state"] == "paused"
    assert text((await edge.run(sandbox, "echo", "here"))["stdout"]) == "here\n"
    assert not frozen(sandbox)
    assert (await edge.view(sandbox))["state"] == "running"


async def test_its_memory_goes_to_swap_and_comes_back(edge: Edge, tmp_path: Path) -> None:
    with swap(4 * SIZE_MB, tmp_path) as kind:
        sandbox = await edge.create(limits=Limits(memory_mb=256, pids=32))
        content = os.urandom(SIZE_MB << 20)
        path = f"/v1/sandboxes/{sandbox}/files?path=/dev/shm/held"
        assert (await edge.http.put(path, content=content)).status_code == 200
        pause = (await change(edge, sandbox, "pause"))["pause"]
        assert isinstance(pause, dict)
        assert pause["memory_before_bytes"] >= SIZE_MB << 20
        assert pause.get("memory_after_bytes", 0) < pause["memory_before_bytes"] * 0.1, kind
        assert pause["swapped_bytes"] > (SIZE_MB << 20) * 0.9
        assert (await edge.http.get(path)).content == content
        await edge.stop(sandbox)


async def test_the_limit_of_a_command_does_not_run_out_in_a_pause(edge: Edge) -> None:
    sandbox = await edge.create()
    await start(edge, sandbox, "sleep", "0.5", command_id="c", timeout_s=5.0)
    await change(edge, sandbox, "pause")
    await anyio.sleep(HELD_S)  # what is tested is time that passes
    await change(edge, sandbox, "resume")
    ended = await result(edge, sandbox, "c")
    assert (ended["exit_code"], ended.get("timed_out", False)) == (0, False)


async def test_a_run_that_waits_goes_on_after_the_pause(edge: Edge) -> None:
    sandbox = await edge.create()
    codes: list[object] = []

    async def work() -> None:
        codes.append((await edge.run(sandbox, "sleep", "0.3", command_id="c"))["exit_code"])

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        with anyio.fail_after(10):
            while (await edge.http.get(f"/v1/sandboxes/{sandbox}/commands/c")).status_code != 200:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await change(edge, sandbox, "pause")
        assert codes == []
        await change(edge, sandbox, "resume")
    assert codes == [0]


async def test_a_killed_edge_finds_it_paused_and_wakes_it(edge: Edge) -> None:
    sandbox = await edge.create()
    await start(edge, sandbox, "sleep", "0.5", command_id="c")
    pause = (await change(edge, sandbox, "pause"))["pause"]
    edge.kill()
    assert frozen(sandbox)
    await edge.start()
    view = await edge.view(sandbox)
    assert (view["state"], view["pause"]) == ("paused", pause)
    assert (await result(edge, sandbox, "c"))["exit_code"] == 0


async def test_a_stop_ends_what_is_frozen(edge: Edge) -> None:
    sandbox = await edge.create()
    await start(edge, sandbox, "sleep", "600")
    await change(edge, sandbox, "pause")
    assert (await edge.stop(sandbox))["stop_reason"] == "requested"


async def test_killed_by_the_host_while_paused_it_is_told(edge: Edge) -> None:
    sandbox = await edge.create()
    await change(edge, sandbox, "pause")
    for pid in groups.processes(detect(NODE), sandbox):
        os.kill(pid, signal.SIGKILL)
    with anyio.fail_after(20):
        while (await edge.view(sandbox))["state"] == "paused":  # noqa: ASYNC110 - the edge's doing
            await anyio.sleep(0.01)
    view = await edge.view(sandbox)
    assert (view["state"], view["stop_reason"]) == ("failed", "died")
    answer = await edge.http.post(f"/v1/sandboxes/{sandbox}/resume")
    assert answer.status_code == 410
