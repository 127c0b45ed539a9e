"""Creation of sandboxes, counted when the output of the first command is back at the SDK.

Three sides in turn within each round: DSec over HTTP, the bare launcher (`aether launch` making the
same mounts, namespaces and cgroups, and nothing else: the floor), and Docker through its API.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec

from bench.harness import (
    IMAGE,
    Docker,
    client_with_image,
    docker,
    median_ms,
    percentile,
    report,
    say,
    server,
)
from dsec.base.errors import DsecError
from dsec.linux.cgroup import remove_tree
from dsec.sdk import DSecClient, DSecContainerRunArgs
from dsec.wire.launch import LaunchReply, LaunchRequest, LaunchSpec

COMMAND = ["/bin/echo", "ready"]
IN_FLIGHT = 16
ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, pids_limit=128)


async def dsec_once(client: DSecClient) -> float:
    """Seconds from asking for a sandbox to the first command's output; it is stopped afterwards."""
    begun = time.perf_counter()
    sandbox = await client.run_container(ARGS)
    result = await sandbox.exec(COMMAND)
    took = time.perf_counter() - begun
    if result.stdout != "ready\n":
        raise RuntimeError(f"unexpected output {result.stdout!r}")
    await sandbox.stop()
    return took


async def docker_once(engine: Docker) -> float:
    """The same with Docker."""
    begun = time.perf_counter()
    container = await engine.create(["/bin/sleep", "3600"])
    if b"ready" not in await engine.exec(container, COMMAND):
        raise RuntimeError("docker exec gave no output")
    took = time.perf_counter() - begun
    await engine.remove(container)
    return took


async def burst(
    n: int, create: Callable[[], Awaitable[str]], stop: Callable[[str], Awaitable[None]]
) -> tuple[float, int]:
    """Create n with 16 in flight.

    Returns:
        Creations per second, and failures. Stopping them is not counted: they all live at once.
    """
    limiter = anyio.CapacityLimiter(IN_FLIGHT)
    made: list[str] = []
    failures = 0

    async def one() -> None:
        nonlocal failures
        async with limiter:
            try:
                made.append(await create())
            except (DsecError, RuntimeError) as error:
                failures += 1
                say(f"failed: {error}")

    begun = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(n):
            group.start_soon(one)
    took = time.perf_counter() - begun

    async def end(name: str) -> None:
        async with limiter:
            await stop(name)

    async with anyio.create_task_group() as group:
        for name in made:
            group.start_soon(end, name)
    return len(made) / took, failures


async def dsec_burst(client: DSecClient, n: int) -> tuple[float, int]:
    """A burst over HTTP."""

    async def create() -> str:
        sandbox = await client.run_container(ARGS)
        result = await sandbox.exec(COMMAND)
        if result.stdout != "ready\n":
            raise RuntimeError(f"unexpected output {result.stdout!r}")
        return sandbox.id

    async def stop(name: str) -> None:
        await (await client.get(name)).stop()

    return await burst(n, create, stop)


async def docker_burst(engine: Docker, n: int) -> tuple[float, int]:
    """A burst with Docker."""

    async def create() -> str:
        container = await engine.create(["/bin/sleep", "3600"])
        if b"ready" not in await engine.exec(container, COMMAND):
            raise RuntimeError("docker exec gave no output")
        return container

    return await burst(n, create, engine.remove)


def capture_spec(server_scratch: Path) -> LaunchSpec:
    """The launch specification the edge wrote for its newest sandbox."""
    files = sorted(
        (server_scratch / "state").rglob("launch.msgpack"), key=lambda path: path.stat().st_mtime
    )
    if not files:
        raise RuntimeError("the edge keeps no launch.msgpack in its sandboxes' directories")
    return msgspec.msgpack.decode(files[-1].read_bytes(), type=LaunchSpec)


def floor_per_s(model: LaunchSpec, scratch: Path, n: int) -> float:
    """Sandboxes per second of bare launchers, one per CPU, driven with nothing in between."""
    home = scratch / "floor"
    home.mkdir()
    launchers = [_Launcher() for _ in range(os.cpu_count() or 1)]
    specs = [_floor_spec(model, home, index) for index in range(n)]
    begun = time.perf_counter()
    pids: list[int] = []
    for start in range(0, n, len(launchers)):
        batch = specs[start : start + len(launchers)]
        for launcher, (index, spec) in zip(launchers, enumerate(batch, start), strict=False):
            launcher.send(LaunchRequest(id=index, spec=spec))
        pids += [launcher.receive() for launcher, _ in zip(launchers, batch, strict=False)]
    took = time.perf_counter() - begun
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for launcher in launchers:
        launcher.close()
    for spec in specs:
        for group in reversed(spec.cgroups):
            remove_tree(Path(group.path))
    shutil.rmtree(home, ignore_errors=True)
    return n / took


def _floor_spec(model: LaunchSpec, home: Path, index: int) -> LaunchSpec:
    def mine(text: str) -> str:
        return text.replace(model.id, f"floor{index}")

    spec = msgspec.structs.replace(
        model,
        id=f"floor{index}",
        uid_base=model.uid_base + 65536 * (5000 + index),
        upper=str(home / f"{index}" / "upper"),
        work=str(home / f"{index}" / "work"),
        socket=str(home / f"{index}.sock"),
        cgroups=[msgspec.structs.replace(group, path=mine(group.path)) for group in model.cgroups],
        agent_v2=mine(model.agent_v2),
        work_v2=mine(model.work_v2),
        work_v1=[mine(path) for path in model.work_v1],
    )
    (home / f"{index}").mkdir()
    return spec


class _Launcher:
    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        aether = os.environ.get("DSEC_AETHER", "aether")
        self._process = subprocess.Popen(
            ["sh", "-c", f'exec "$0" launch 3<&{theirs.fileno()}', aether],
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()

    def send(self, request: LaunchRequest) -> None:
        body = msgspec.msgpack.encode(request)
        self._ours.sendall(struct.pack(">I", len(body)) + body)

    def receive(self) -> int:
        while True:
            (size,) = struct.unpack(">I", self._exactly(4))
            answer = msgspec.msgpack.decode(self._exactly(size))
            if "exited" in answer:
                continue
            reply = msgspec.convert(answer, LaunchReply)
            if not reply.pid:
                raise RuntimeError(f"launch failed at {reply.step} {reply.path}: {reply.message}")
            return reply.pid

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._ours.recv(size - len(data))
            if not piece:
                raise RuntimeError("the launcher ended")
            data += piece
        return data

    def close(self) -> None:
        self._ours.close()
        self._process.wait(30)


async def main(options: argparse.Namespace) -> dict[str, object]:
    """Measure in rounds, each side in turn within a round."""
    serial: list[float] = []
    bursts: list[float] = []
    floors: list[float] = []
    dockers: list[float] = []
    failures = 0
    with server() as it:
        async with client_with_image(it.scratch) as client, docker(it.scratch) as engine:
            for _warm in range(5):
                await dsec_once(client)
            await docker_once(engine)
            for number in range(options.rounds):
                say(f"round {number + 1} of {options.rounds}")
                serial += [await dsec_once(client) for _ in range(options.serial)]
                rate, failed = await dsec_burst(client, options.burst)
                bursts.append(rate)
                failures += failed
                probe = await client.run_container(ARGS)
                floors.append(floor_per_s(capture_spec(it.scratch), it.scratch, 150))
                await probe.stop()
                rate, failed = await docker_burst(engine, options.docker)
                dockers.append(rate)
                say(
                    f"burst {bursts[-1]:.0f}/s, floor {floors[-1]:.0f}/s, docker {dockers[-1]:.1f}/s"
                )
    burst_rate, docker_rate = (sorted(rates)[len(rates) // 2] for rates in (bursts, dockers))
    return {
        "serial_p50_ms": median_ms(serial),
        "serial_p99_ms": round(percentile(serial, 0.99) * 1000, 3),
        "burst_n": options.burst,
        "burst_per_s": round(burst_rate, 1),
        "failures": failures,
        "floor_per_s": round(sorted(floors)[len(floors) // 2], 1),
        "docker_per_s": round(docker_rate, 2),
        "ratio_docker": round(burst_rate / docker_rate, 1),
    }


if __name__ == "__main__":
    report(main, rounds=3, serial=50, burst=300, docker=32)
