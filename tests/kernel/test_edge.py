"""A real edge with real containers: limits, deaths, kill -9 of the edge, what is left behind."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
import websockets.exceptions
from websockets.asyncio.client import unix_connect

from dsec.base.ids import NodeId, mint_sandbox_id
from dsec.images.service import ImageService, finish
from dsec.linux import mounts
from dsec.wire.edge_v1 import CreateOnEdge
from dsec.wire.sandbox import Limits, SandboxSpec

pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]

REPOSITORY = Path(__file__).parents[2]
BUILT = REPOSITORY / "native/target/x86_64-unknown-linux-gnu/release"
NODE = "kt3s"
PROMPT_S = 10.0
START_S = 120.0
"""An edge starts within a second; in a guest without KVM on a busy machine it takes half a minute."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def aether() -> Path:
    """The helper; another build than the tree's by DSEC_AETHER."""
    if given := os.environ.get("DSEC_AETHER"):
        return Path(given)
    subprocess.run(
        ["cargo", "build", "--quiet", "--release"], cwd=REPOSITORY / "native", check=True
    )
    return BUILT / "aether"


@pytest.fixture(scope="session")
def store(aether: Path) -> Iterator[Path]:
    """An image that holds the probe and nothing else, imported once."""
    with tempfile.TemporaryDirectory(prefix="edge") as directory:
        home = Path(directory)
        tree = home / "tree"
        for part in ("etc", "tmp", "root", "proc", "sys", "dev"):
            (tree / part).mkdir(parents=True)
        shutil.copy(os.environ.get("DSEC_PROBE", BUILT / "probe"), tree / "probe")
        (tree / "etc/passwd").write_text("root:x:0:0::/root:/probe\n")
        (tree / "etc/group").write_text("root:x:0:\n")

        async def load() -> None:
            async with ImageService(home / "images", home / "layers") as images:
                await finish(images.import_path(tree, "probe"))

        anyio.run(load)
        yield home
        for mount in mounts.mounts_under(home):
            mounts.umount(Path(mount.target), detach=True)


class Edge:
    """The process, and a client of it."""

    def __init__(self, home: Path, aether: Path) -> None:
        self.home = home
        self._argv = [sys.executable, str(Path(__file__).with_name("edge_process.py"))]
        self._argv += [str(home), NODE, str(aether)]
        self._child: subprocess.Popen[bytes] | None = None
        transport = httpx.AsyncHTTPTransport(uds=str(home / "edge.sock"))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://edge", timeout=60)

    async def start(self) -> None:
        (self.home / "edge.sock").unlink(missing_ok=True)
        paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
        # Not awaited: it is killed in the middle of things, and waited for by hand.
        self._child = subprocess.Popen(  # noqa: ASYNC220
            self._argv, env={**os.environ, "PYTHONPATH": paths}
        )
        with anyio.fail_after(START_S):
            while True:
                assert self._child.poll() is None, "the edge did not start"
                with contextlib.suppress(httpx.TransportError):
                    await self.http.get("/edge/v1/node")
                    return
                await anyio.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self._child is not None
        self._child.send_signal(number)
        self._child.wait(30)

    async def close(self) -> None:
        await self.http.aclose()
        if self._child is not None and self._child.poll() is None:
            self.kill(signal.SIGTERM)

    async def create(self, sandbox: str = "", **spec: Any) -> str:
        sandbox = sandbox or mint_sandbox_id(NodeId(NODE))
        fields = {"image": "probe", "limits": Limits(memory_mb=64, cpu_cores=1, pids=32), **spec}
        body = CreateOnEdge(id=sandbox, project="p", spec=SandboxSpec(**fields))
        answer = await self.http.post("/edge/v1/sandboxes", content=msgspec.json.encode(body))
        assert answer.status_code == 200, answer.text
        return sandbox

    async def run(self, sandbox: str, *argv: str, **more: Any) -> dict[str, Any]:
        body = {"argv": ["/probe", *argv], **more}
        answer = await self.http.post(f"/v1/sandboxes/{sandbox}/commands/run", json=body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    async def view(self, sandbox: str) -> dict[str, Any]:
        answer = await self.http.get(f"/v1/sandboxes/{sandbox}")
        assert answer.status_code == 200, answer.text
        view: dict[str, Any] = answer.json()
        return view

    async def stop(self, sandbox: str) -> dict[str, Any]:
        answer = await self.http.delete(f"/v1/sandboxes/{sandbox}")
        assert answer.status_code == 200, answer.text
        view: dict[str, Any] = answer.json()
        return view

    async def listed(self) -> dict[str, dict[str, Any]]:
        answer = await self.http.post("/edge/v1/sandboxes:list", json={})
        return {view["id"]: view for view in answer.json()}


def groups() -> list[str]:
    # Not by glob: groups of other edges may go while one looks, which this passes over.
    places = (Path(place) / name for place, names, _ in os.walk("/sys/fs/cgroup") for name in names)
    return [str(path) for path in places if NODE in path.name]


def aethers() -> list[str]:
    """Processes of this edge's sandboxes; those that only wait to be reaped by init aside."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ended = "\nState:\tZ" in (entry / "status").read_text()
            if not ended and f"dsec-{NODE}" in (entry / "cgroup").read_text():
                found.append(entry.name)
    return found


def owners_of(pids: list[str]) -> set[int]:
    return {Path(f"/proc/{pid}").stat().st_uid for pid in pids}


def mounts_of(home: Path) -> set[str]:
    """Where this edge has mounted something, layers aside, which stay; other edges have theirs."""
    targets = {mount.target for mount in mounts.list_mounts()}
    ours = {target for target in targets if target.startswith(f"{home}/") or NODE in target}
    return {target for target in ours if "/layers/" not in target}


@pytest.fixture
async def edge(store: Path, aether: Path) -> AsyncIterator[Edge]:
    """A running edge; after the test nothing of it may be left."""
    for part in ("state", "run"):
        shutil.rmtree(store / part, ignore_errors=True)
    before = mounts_of(store)
    edge = Edge(store, aether)
    await edge.start()
    try:
        yield edge
        for sandbox, view in (await edge.listed()).items():
            if view["state"] in ("running", "paused"):
                await edge.stop(sandbox)
    finally:
        await edge.close()
    assert groups() == []
    assert aethers() == []
    assert list((store / "run").iterdir()) == []
    assert list((store / "state/sandboxes").iterdir()) == []
    assert mounts_of(store) <= before


def text(captured: dict[str, Any]) -> str:
    raw = base64.b64decode(captured.get("head", "")) + base64.b64decode(captured.get("tail", ""))
    return raw.decode()


async def test_a_command_runs_as_nobody_of_the_host(edge: Edge) -> None:
    sandbox = await edge.create(env={"COLOUR": "blue"}, hostname="box")
    result = await edge.run(sandbox, "env", "COLOUR")
    assert (result["exit_code"], text(result["stdout"]).strip()) == (0, "blue")
    assert (await edge.run(sandbox, "exit", "7"))["exit_code"] == 7
    started = await edge.http.post(
        f"/v1/sandboxes/{sandbox}/commands", json={"argv": ["/probe", "sleep", "30"]}
    )
    assert started.status_code == 201
    assert owners_of(aethers()) & set(range(1 << 20)) == set()


async def test_a_command_over_its_memory_is_killed_and_says_so(edge: Edge) -> None:
    sandbox = await edge.create()
    result = await edge.run(sandbox, "alloc", "200")
    assert result["oom_killed"]
    assert result["exit_code"] != 0
    assert "oom_killed" not in await edge.run(sandbox, "exit", "137")
    usage = (await edge.http.get(f"/v1/sandboxes/{sandbox}/usage")).json()
    assert usage["memory_limit_bytes"] == 64 << 20
    assert usage["oom_kills"] >= 1
    assert usage["cpu_s"] > 0


async def test_what_it_wrote_is_counted(edge: Edge) -> None:
    sandbox = await edge.create()
    place = f"/v1/sandboxes/{sandbox}"
    written = await edge.http.put(f"{place}/files?path=/large", content=os.urandom(5 << 20))
    assert written.status_code == 200
    usage = (await edge.http.get(f"{place}/usage")).json()
    assert 5 << 20 <= usage["disk_bytes"] < 6 << 20


async def test_a_fork_bomb_meets_its_limit_and_ends_whole(edge: Edge) -> None:
    sandbox = await edge.create()
    result = await edge.run(sandbox, "forkbomb", "200", timeout_s=1.0)
    assert result["exit_code"] is not None
    usage = (await edge.http.get(f"/v1/sandboxes/{sandbox}/usage")).json()
    assert usage.get("pids", 0) <= 32
    assert (await edge.run(sandbox, "exit", "0"))["exit_code"] == 0


async def test_files_go_in_and_out_unchanged(edge: Edge) -> None:
    sandbox = await edge.create()
    files, data = f"/v1/sandboxes/{sandbox}/files", os.urandom(3_000_000)
    put = await edge.http.put(files, params={"path": "/tmp/ä b", "mode": "600"}, content=data)
    assert put.json()["size_bytes"] == len(data)
    got = await edge.http.get(files, params={"path": "/tmp/ä b"})
    assert got.content == data
    assert got.headers["x-file-mode"] == "600"
    part = await edge.http.get(files, params={"path": "/tmp/ä b", "offset": 5, "length": 7})
    assert part.content == data[5:12]
    missing = await edge.http.get(files, params={"path": "/tmp/none"})
    assert missing.status_code == 404
    assert missing.json()["error"]["details"]["kind"] == "path"


async def test_a_broken_upload_leaves_the_old_file(edge: Edge) -> None:
    sandbox = await edge.create()
    files = f"/v1/sandboxes/{sandbox}/files"
    await edge.http.put(files, params={"path": "/tmp/a"}, content=b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield bytes(500_000)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await edge.http.put(files, params={"path": "/tmp/a"}, content=broken())
    listed: list[str] = []
    with anyio.fail_after(PROMPT_S):
        while listed != ["a"]:  # the temporary file goes once the edge has noticed
            answer = await edge.http.get(f"{files}/list", params={"path": "/tmp"})
            listed = [Path(entry["path"]).name for entry in answer.json()]
            await anyio.sleep(0.01)
    assert (await edge.http.get(files, params={"path": "/tmp/a"})).content == b"old"


async def test_a_port_inside_is_reached(edge: Edge) -> None:
    sandbox = await edge.create()
    await edge.http.post(
        f"/v1/sandboxes/{sandbox}/commands", json={"argv": ["/probe", "listen", "8000"]}
    )
    url = f"ws://edge/v1/sandboxes/{sandbox}/ports/8000"
    with anyio.fail_after(PROMPT_S):
        while True:
            try:
                async with unix_connect(str(edge.home / "edge.sock"), url) as socket:
                    await socket.send(b"ping")
                    assert await socket.recv()
                    break
            except websockets.exceptions.InvalidStatus:
                await anyio.sleep(0.02)


async def test_the_death_of_aether_is_told_at_once(edge: Edge) -> None:
    sandbox = await edge.create()
    failures: list[dict[str, Any]] = []

    async def follow() -> None:
        url = f"/v1/sandboxes/{sandbox}/commands/stream"
        body = {"argv": ["/probe", "sleep", "60"]}
        async with edge.http.stream("POST", url, json=body) as answer:
            async for line in answer.aiter_lines():
                failures.append(msgspec.json.decode(line))  # noqa: PERF401 - each at once

    async with anyio.create_task_group() as group:
        group.start_soon(follow)
        await _until(lambda: failures)
        first = min(aethers(), key=int)
        begun = time.monotonic()
        os.kill(int(first), signal.SIGKILL)
    assert time.monotonic() - begun < 2
    assert failures[-1]["type"] == "error"
    assert failures[-1]["code"] == "sandbox_gone"
    await _until_async(edge, sandbox, "failed")
    view = await edge.view(sandbox)
    assert view["stop_reason"] == "died"
    assert "signal 9" in view["stop_detail"]


async def test_kill_9_of_the_edge_loses_nothing(edge: Edge) -> None:
    sandbox, stopped = await edge.create(), await edge.create()
    await edge.http.put(
        f"/v1/sandboxes/{sandbox}/files", params={"path": "/tmp/kept"}, content=b"kept"
    )
    await edge.http.post(
        f"/v1/sandboxes/{sandbox}/commands",
        json={"argv": ["/probe", "sleep", "1"], "command_id": "slow"},
    )
    await edge.stop(stopped)
    edge.kill()
    await edge.start()
    assert (await edge.view(sandbox))["state"] == "running"
    assert (await edge.view(stopped))["stop_reason"] == "requested"
    result = await edge.http.get(f"/v1/sandboxes/{sandbox}/commands/slow/result")
    assert result.json()["exit_code"] == 0
    kept = await edge.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/tmp/kept"})
    assert kept.content == b"kept"
    assert await edge.create(sandbox) == sandbox
    assert (await edge.run(await edge.create(), "exit", "3"))["exit_code"] == 3


async def test_kill_9_amid_creations_leaves_nothing_half_made(edge: Edge) -> None:
    for delay in (0.02, 0.05, 0.1):
        asked = [mint_sandbox_id(NodeId(NODE)) for _ in range(20)]
        created: list[str] = []

        async def create(sandbox: str, done: list[str] = created) -> None:
            with contextlib.suppress(httpx.TransportError):
                done.append(await edge.create(sandbox))

        async with anyio.create_task_group() as group:
            for sandbox in asked:
                group.start_soon(create, sandbox)
            await anyio.sleep(delay)
            edge.kill()
        await edge.start()
        listed = await edge.listed()
        assert all(listed[sandbox]["state"] == "running" for sandbox in created)
        live = {sandbox for sandbox in asked if listed.get(sandbox, {}).get("state") == "running"}
        assert {Path(group).name for group in groups() if "sbx" in group} == live
        for sandbox in live:
            assert (await edge.run(sandbox, "exit", "5"))["exit_code"] == 5
            await edge.stop(sandbox)


async def test_sandboxes_outlive_a_launcher(edge: Edge) -> None:
    sandbox = await edge.create()
    launchers = _children(edge)
    assert launchers
    for pid in launchers:
        os.kill(pid, signal.SIGKILL)
    assert (await edge.run(sandbox, "exit", "4"))["exit_code"] == 4
    with anyio.fail_after(PROMPT_S):
        while True:
            answer = await edge.http.post(
                "/edge/v1/sandboxes",
                json={
                    "id": mint_sandbox_id(NodeId(NODE)),
                    "project": "p",
                    "spec": {"image": "probe"},
                },
            )
            if answer.status_code == 200:
                break
            assert re.search("ended|no process", answer.text)
            await anyio.sleep(0.05)


def _children(edge: Edge) -> list[int]:
    assert edge._child is not None
    threads = Path(f"/proc/{edge._child.pid}/task").glob("*/children")
    return [int(pid) for thread in threads for pid in thread.read_text().split()]


async def _until(condition: Any) -> None:
    with anyio.fail_after(PROMPT_S):
        while not condition():  # noqa: ASYNC110 - the condition is another process's
            await anyio.sleep(0.005)


async def _until_async(edge: Edge, sandbox: str, state: str) -> None:
    with anyio.fail_after(PROMPT_S):
        while (await edge.view(sandbox))["state"] != state or any(  # noqa: ASYNC110 - as above
            sandbox in group for group in groups()
        ):
            await anyio.sleep(0.01)
