"""Latency of a command: from the SDK's call to its output back, against docker exec."""

from __future__ import annotations

import argparse
import time

from bench.harness import (
    IMAGE,
    client_with_image,
    docker,
    median_ms,
    percentile,
    report,
    say,
    server,
)
from dsec.sdk import DSecContainerRunArgs

COMMAND = ["/bin/echo", "ready"]


async def main(options: argparse.Namespace) -> dict[str, object]:
    """Measure in rounds, each side in turn within a round."""
    ours: list[float] = []
    theirs: list[float] = []
    with server() as it:
        async with client_with_image(it.scratch) as client, docker(it.scratch) as engine:
            sandbox = await client.run_container(DSecContainerRunArgs(container_image=IMAGE))
            container = await engine.create(["/bin/sleep", "3600"])
            for _warm in range(20):
                await sandbox.exec(COMMAND)
            await engine.exec(container, COMMAND)
            for number in range(options.rounds):
                say(f"round {number + 1} of {options.rounds}")
                for _ in range(options.calls):
                    begun = time.perf_counter()
                    result = await sandbox.exec(COMMAND)
                    ours.append(time.perf_counter() - begun)
                    if result.stdout != "ready\n":
                        raise RuntimeError(f"unexpected output {result.stdout!r}")
                for _ in range(max(1, options.calls // 10)):
                    begun = time.perf_counter()
                    if b"ready" not in await engine.exec(container, COMMAND):
                        raise RuntimeError("docker exec gave no output")
                    theirs.append(time.perf_counter() - begun)
            await sandbox.stop()
            await engine.remove(container)
    p50, docker_p50 = median_ms(ours), median_ms(theirs)
    return {
        "p50_ms": p50,
        "p99_ms": round(percentile(ours, 0.99) * 1000, 3),
        "docker_p50_ms": docker_p50,
        "ratio_docker": round(docker_p50 / p50, 1),
    }


if __name__ == "__main__":
    report(main, rounds=5, calls=200)
