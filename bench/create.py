"""Creation of sandboxes, counted when the output of the first command is back at the SDK.

Three sides in turn within each round: DSec over HTTP, the bare launcher (`aether launch` making the
same mounts, namespaces and cgroups, and nothing else: the floor), and Docker through its API.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

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
from dsec.edge.backends.launch_spec import CommandLimits, HostFacts, launch_spec
from dsec.edge.launcher import Launchers
from dsec.edge.record import SandboxRecord
from dsec.images.records import Environment
from dsec.linux.cgroup import groups
from dsec.linux.cgroup.detect import detect
from dsec.sdk import DSecClient, DSecContainerRunArgs
from dsec.wire.launch import LaunchSpec
from dsec.wire.public_v1 import ImageView
from dsec.wire.sandbox import Limits, SandboxSpec

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


class Floor:
    """Bare launchers making what the edge would make for the same image, driven with nothing between."""

    def __init__(self, scratch: Path, image: ImageView) -> None:
        self._home = scratch / "floor"
        self._home.mkdir()
        mounts = scratch / "run" / "layers"
        self._layers = [
            str(mounts / layer.removeprefix("sha256:")) for layer in reversed(image.layers)
        ]
        self._image = image
        self._layout = detect("floor")
        groups.prepare(self._layout)
        self._launchers = Launchers(Path(os.environ["DSEC_AETHER"]))

    async def rate(self, n: int) -> float:
        """Sandboxes per second, as many in flight as in the other bursts; they are ended after."""
        limiter = anyio.CapacityLimiter(IN_FLIGHT)
        specs = [self._spec(index) for index in range(n)]
        pids: list[int] = []

        async def one(spec: LaunchSpec) -> None:
            async with limiter:
                pids.append((await self._launchers.launch(spec)).pid)

        async with self._launchers.running():
            begun = time.perf_counter()
            async with anyio.create_task_group() as group:
                for spec in specs:
                    group.start_soon(one, spec)
            took = time.perf_counter() - begun
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for spec in specs:
                groups.kill(self._layout, spec.id)
                groups.remove(self._layout, spec.id)
        return n / took

    def close(self) -> None:
        """Remove what is left."""
        groups.retire(self._layout)
        shutil.rmtree(self._home, ignore_errors=True)

    def _spec(self, index: int) -> LaunchSpec:
        name = f"floor{time.monotonic_ns()}"
        directory = self._home / name
        directory.mkdir()
        record = SandboxRecord(
            id=name,
            project="",
            spec=SandboxSpec(image=IMAGE, limits=Limits(memory_mb=256, pids=128)),
            environment=Environment(image=self._image),
            created_at=0.0,
            uid_base=(20_000 + index) * 65536,
            directory=str(directory),
            socket=str(directory / "sock"),
        )
        facts = HostFacts(nofile_max=1024, fuse=True)
        return launch_spec(record, self._layers, self._layout, CommandLimits(), facts)


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
            (image,) = await client.images.list()
            floor = Floor(it.scratch, image)
            for number in range(options.rounds):
                say(f"round {number + 1} of {options.rounds}")
                serial += [await dsec_once(client) for _ in range(options.serial)]
                rate, failed = await dsec_burst(client, options.burst)
                bursts.append(rate)
                failures += failed
                floors.append(await floor.rate(options.floor))
                rate, failed = await docker_burst(engine, options.docker)
                dockers.append(rate)
                say(
                    f"burst {bursts[-1]:.0f}/s, floor {floors[-1]:.0f}/s, docker {dockers[-1]:.1f}/s"
                )
            floor.close()
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
    report(main, rounds=3, serial=50, burst=300, floor=150, docker=32)
