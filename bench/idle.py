"""Host memory of idle sandboxes: MemAvailable before and after."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import anyio

from bench.harness import IMAGE, client_with_image, report, say, server
from dsec.base.errors import DsecError
from dsec.sdk import DSecContainerRunArgs

SETTLE_S = 10.0


def available_mib() -> float:
    """MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


async def main(options: argparse.Namespace) -> dict[str, object]:
    """Create many, let them idle, look at the host, and ask each whether it lives."""
    args = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, ttl_running_stop=None)
    with server() as it:
        async with client_with_image(it.scratch) as client:
            warm = await client.run_container(args)
            await warm.exec(["/bin/true"])
            await anyio.sleep(SETTLE_S)
            before = available_mib()
            begun = time.perf_counter()
            made = [item async for item in client.run_containers(args, count=options.n)]
            sandboxes = [item for item in made if not isinstance(item, DsecError)]
            failures = len(made) - len(sandboxes)
            say(f"{len(sandboxes)} created in {time.perf_counter() - begun:.1f} s")
            await anyio.sleep(SETTLE_S)
            after = available_mib()
            limiter = anyio.CapacityLimiter(16)

            async def ask(index: int) -> None:
                nonlocal failures
                async with limiter:
                    try:
                        result = await sandboxes[index].exec(["/bin/echo", str(index)])
                        failures += result.stdout != f"{index}\n"
                    except DsecError as error:
                        say(f"{sandboxes[index].id}: {error}")
                        failures += 1

            async with anyio.create_task_group() as group:
                for index in range(len(sandboxes)):
                    group.start_soon(ask, index)
            say("all have been asked")
    return {
        "n": len(sandboxes),
        "mib_each": round((before - after) / max(1, len(sandboxes)), 3),
        "failures": failures,
    }


if __name__ == "__main__":
    report(main, n=1000)
