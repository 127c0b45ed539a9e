"""What a checkpoint costs, what a sandbox begun from one costs, and what both save.

- pack: a sandbox of a Debian image has written 10 MB of noise in 200 files; `pack` to its answer.
- restore and create: from asking for a sandbox to a command's output, restored from that snapshot
  and made from the image, in turn.
- fork: from asking for the children of that sandbox to the last of them running.
- replay: in a fresh sandbox, `pip install` of real packages from wheels that were put there before
  (sandboxes have no network) and a compilation of C. Against it, a sandbox restored from a snapshot
  of the result, to the output of what was compiled.

Wheels come from the package index that the host's own pip is configured for, once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import corpus
from bench.harness import Server, median_ms, report, say, server
from dsec.images.service import ImageService, finish
from dsec.kit.blocking import in_thread
from dsec.sdk import DSecClient, DSecContainerRunArgs, Sandbox

IMAGE = "snapshot"
PACKAGES = ("python3", "python3-pip", "gcc", "libc6-dev", "make")
WHEELS = ("numpy", "pandas", "sympy", "flask", "pytest", "requests", "rich", "networkx")
CHECK = "import numpy, pandas, sympy, flask, pytest, requests, rich, networkx"
FILES, FILE_BYTES = 200, 50_000
UNITS = 8
PROJECT = "/root/project"
FIRST = ["/bin/echo", "1"]


async def make_image(place: Path) -> None:
    """The image as an OCI layout, and the wheels."""
    root = place / "root"
    await corpus.debian_tree(PACKAGES, root)
    arguments = ["-C", str(root), "--sort=name", "."]
    packed = await in_thread("build", corpus.pack_tar, arguments, place / "layer.tar.gz")
    corpus.write_layout([(place / packed.path, packed)], place / "layout")
    await in_thread("disk", shutil.rmtree, root)
    await in_thread("build", corpus.download, WHEELS, place / "wheels")


async def make_state(place: Path, target: Path) -> None:
    """A node's state with the image in it."""
    async with ImageService(target / "images", target / "filling") as images:
        await finish(images.import_path(place / "layout", IMAGE))


def write_noise(place: Path) -> float:
    """The changed files; their size in MB."""
    for number in range(FILES):
        (place / f"{number:03}").write_bytes(os.urandom(FILE_BYTES))
    return FILES * FILE_BYTES / 1e6


def write_project(place: Path) -> None:
    """A program of many units, none of which is trivial to compile."""
    for unit in range(UNITS):
        body = "\n".join(
            f"double f{unit}_{n}(double x) {{ double s = 0; for (int i = 1; i < 99; i++)"
            f" s += x * i / ({n} + i * i); return s; }}"
            for n in range(200)
        )
        (place / f"unit{unit}.c").write_text(body)
    (place / "main.c").write_text(
        '#include <stdio.h>\ndouble f0_0(double);\nint main(void) { puts(f0_0(1) > 0 ? "1" : "0"); }\n'
    )
    objects = " ".join([f"unit{unit}.o" for unit in range(UNITS)] + ["main.o"])
    (place / "Makefile").write_text(f"CFLAGS = -O2\nprogram: {objects}\n\tgcc -o $@ $^\n")


def _args(image: str = IMAGE) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, memory_limit_mb=2048, pids_limit=256)


async def _answers(sandbox: Sandbox, command: Sequence[str]) -> None:
    result = await sandbox.exec(list(command))
    if result.exit_code or result.stdout != "1\n":
        raise RuntimeError(f"unexpected output {result!r}")


class Figures:
    """What was measured, in seconds."""

    def __init__(self) -> None:
        self.packs: list[float] = []
        self.frozen_ms: list[float] = []
        self.restores: list[float] = []
        self.creates: list[float] = []
        self.forks: list[float] = []
        self.replays: list[float] = []
        self.restored_replays: list[float] = []


async def _created(client: DSecClient) -> float:
    begun = time.perf_counter()
    async with await client.run_container(_args()) as sandbox:
        await _answers(sandbox, FIRST)
        return time.perf_counter() - begun


async def _restored(client: DSecClient, name: str, command: Sequence[str]) -> float:
    begun = time.perf_counter()
    async with await client.restore(name, _args()) as sandbox:
        await _answers(sandbox, command)
        return time.perf_counter() - begun


async def _forked(sandbox: Sandbox, count: int) -> float:
    begun = time.perf_counter()
    children = await sandbox.fork(count)
    took = time.perf_counter() - begun
    await _answers(children[-1], ["cat", "/root/noise/one"])
    for child in children:
        await child.stop()
    return took


async def checkpoint(
    client: DSecClient, noise: Path, options: argparse.Namespace, to: Figures
) -> None:
    """Pack, restore and fork a sandbox that has written much, some rounds."""
    for number in range(options.rounds):
        write_noise(noise)  # the node may still have the last round's, and would not write it again
        async with await client.run_container(_args()) as sandbox:
            await sandbox.files.upload_tree(noise, "/root/noise")
            await sandbox.files.write("/root/noise/one", "1\n")
            begun = time.perf_counter()
            view = await sandbox.pack(f"noise{number}")
            to.packs.append(time.perf_counter() - begun)
            to.frozen_ms.append(view.frozen_ms)
            for _ in range(options.restores):
                to.restores.append(await _restored(client, view.name, FIRST))
                to.creates.append(await _created(client))
            to.forks.append(await _forked(sandbox, options.forks))
        await client.snapshots.remove(view.name)
        say(
            f"round {number + 1}: pack {to.packs[-1] * 1000:.0f} ms, frozen {view.frozen_ms:.1f} ms, "
            f"{options.forks} forks {to.forks[-1]:.2f} s"
        )


async def replay(client: DSecClient, wheels: Path, project: Path, to: Figures) -> None:
    """Build an environment, and restore what was built."""
    begun = time.perf_counter()
    async with await client.run_container(_args()) as sandbox:
        made = time.perf_counter() - begun
        await sandbox.files.upload_tree(wheels, "/tmp/wheels")
        await sandbox.files.upload_tree(project, PROJECT)
        begun = time.perf_counter()
        await _must(
            sandbox,
            "pip install -q --no-index --find-links /tmp/wheels --break-system-packages "
            f"--root-user-action=ignore {' '.join(WHEELS)}",
        )
        await _must(sandbox, f"make -s -C {PROJECT} -j$(nproc)")
        await _must(sandbox, f"rm -rf /tmp/wheels && {PROJECT}/program")
        to.replays.append(made + time.perf_counter() - begun)
        view = await sandbox.pack("built")
    to.restored_replays += [
        await _restored(client, view.name, [f"{PROJECT}/program"]) for _ in range(5)
    ]
    async with await client.restore(view.name, _args()) as sandbox:
        await _must(sandbox, f"python3 -c '{CHECK}'")
    await client.snapshots.remove(view.name)
    say(f"replay {to.replays[-1]:.1f} s, {view.entries} entries, {view.size_bytes >> 20} MiB")


async def _must(sandbox: Sandbox, line: str) -> None:
    result = await sandbox.run_shell(line, timeout=1200)
    if result.exit_code:
        raise RuntimeError(f"{line}: {result.stdout}{result.stderr}")


def _summary(diff_mb: float, forks: int, found: Figures) -> dict[str, object]:
    replay_s = statistics.median(found.replays)
    return {
        "diff_mb": diff_mb,
        "pack_p50_ms": median_ms(found.packs),
        "frozen_p50_ms": round(statistics.median(found.frozen_ms), 3),
        "restore_first_exec_p50_ms": median_ms(found.restores),
        "create_first_exec_p50_ms": median_ms(found.creates),
        "fork_n": forks,
        "fork_s": round(statistics.median(found.forks), 3),
        "replay_s": round(replay_s, 2),
        "ratio_replay": round(replay_s / statistics.median(found.restored_replays), 1),
    }


async def _measure(it: Server, wheels: Path, options: argparse.Namespace) -> dict[str, object]:
    noise, project = it.scratch / "noise", it.scratch / "project"
    noise.mkdir()
    project.mkdir()
    diff_mb = write_noise(noise)
    write_project(project)
    found = Figures()
    async with DSecClient() as client:
        for _warm in range(3):
            await _created(client)
        await checkpoint(client, noise, options, found)
        for _round in range(options.replays):
            await replay(client, wheels, project, found)
    return _summary(diff_mb, options.forks, found)


async def main(options: argparse.Namespace) -> dict[str, object]:
    """Measure in rounds."""
    place = await corpus.made("snapshot", make_image)
    state = Path(await in_thread("disk", tempfile.mkdtemp, None, "dsec-bench-"))
    try:
        await make_state(place, state)
        with server(state=state) as it:
            return await _measure(it, place / "wheels", options)
    finally:
        await in_thread("disk", shutil.rmtree, state)


if __name__ == "__main__":
    report(main, rounds=5, restores=10, forks=100, replays=1)
