"""Pausing a sandbox that holds memory: how much comes back, how long it takes, how soon it works again.

Each sandbox has touched anonymous memory and read a file; it is paused once, and either resumed in
so many words or by its next command. Swap is made for the time of the run where the host has none.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import anyio

from bench.harness import IMAGE, client_with_image, median_ms, report, say, server
from bench.swap import swap
from dsec.sdk import DSecClient, DSecContainerRunArgs, Sandbox

COMMAND = ["/bin/echo", "ready"]
READY_S = 60.0


@dataclass(frozen=True)
class Round:
    """What one sandbox showed. Seconds."""

    reclaimed: float
    """Share of its memory."""
    pause_s: float
    again_s: float
    """Until it ran again, or until its next command's output was there."""


async def filled(client: DSecClient, anon_mib: int, file_mib: int) -> Sandbox:
    """A sandbox with so much memory of its own and so much of files."""
    args = DSecContainerRunArgs(
        container_image=IMAGE, memory_limit_mb=anon_mib + file_mib + 200, pids_limit=128
    )
    sandbox = await client.run_container(args)
    dd = "dd if=/dev/urandom iflag=fullblock"
    # The first one holds its buffer for as long as nobody reads what it writes.
    await sandbox.start(shell=f"{dd} bs={anon_mib}M count=1 | sleep 3600")
    made = await sandbox.run_shell(f"{dd} of=/root/data bs=1M count={file_mib} conv=fsync")
    read = await sandbox.run_shell("cat /root/data >/dev/null")
    if made.exit_code or read.exit_code:
        raise RuntimeError(made.stderr + read.stderr)
    with anyio.fail_after(READY_S):
        while (await sandbox.usage()).memory_bytes < (anon_mib + file_mib) << 20:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    return sandbox


async def once(client: DSecClient, options: argparse.Namespace, *, by_command: bool) -> Round:
    """One sandbox's pause and what ends it."""
    sandbox = await filled(client, options.anon, options.file)
    begun = time.perf_counter()
    view = await sandbox.pause()
    paused = time.perf_counter()
    if by_command:
        result = await sandbox.exec(COMMAND)
        if result.stdout != "ready\n":
            raise RuntimeError(f"unexpected output {result.stdout!r}")
    else:
        await sandbox.resume()
    again = time.perf_counter()
    await sandbox.stop()
    given = view.pause
    if given is None:
        raise RuntimeError("it was not paused")
    if given.detail:
        say(given.detail)
    share = 1 - given.memory_after_bytes / given.memory_before_bytes
    return Round(share, paused - begun, again - paused)


async def main(options: argparse.Namespace) -> dict[str, object]:
    """Measure."""
    resumed: list[Round] = []
    asked: list[Round] = []
    with swap(2 * options.anon) as kind, server() as it:
        say(f"swap: {kind}")
        async with client_with_image(it.scratch) as client:
            await once(client, options, by_command=True)
            for number in range(options.rounds):
                say(f"round {number + 1} of {options.rounds}")
                resumed.append(await once(client, options, by_command=False))
                asked.append(await once(client, options, by_command=True))
    every = resumed + asked
    return {
        "anon_mib": options.anon,
        "reclaimed_pct": round(100 * min(one.reclaimed for one in every), 1),
        "pause_p50_ms": median_ms([one.pause_s for one in every]),
        "resume_p50_ms": median_ms([one.again_s for one in resumed]),
        "resume_first_exec_p50_ms": median_ms([one.again_s for one in asked]),
    }


if __name__ == "__main__":
    report(main, rounds=5, anon=200, file=100)
