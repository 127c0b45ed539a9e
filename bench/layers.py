"""A workspace and two toolkits for many sandboxes: as layers, or unpacked in each of them.

The workspace is Django from PyPI; the toolkits are numpy, and mypy with ruff; each has all it
depends on. Both ways run on the same node and image, a Debian with python3, 16 sandboxes on their
way at a time:

- erofs: sandboxes are created with workspace and toolkits, which were published to the node before.
- targz: sandboxes are created without; then each unpacks the three as tar.gz into its own writable
  layer, as harnesses do that have no layers. The archives lie in the image already: nothing is
  uploaded, which favours this way.

The set-up time is the wall time until all sandboxes are ready for their first tool call. Then each
runs the same recorded tool calls, and what is on the disk is counted: for erofs the layers
themselves, once, too.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from bench import corpus, nodes, ondemand
from bench.corpus import MIB
from bench.harness import Server, report, say, server
from dsec.kit.blocking import in_thread
from dsec.kit.together import together
from dsec.sdk import DSecClient, DSecContainerRunArgs, Sandbox

IMAGE = "layers"
WORKSPACE = "django"
TOOLKITS = {"numeric": ("numpy",), "checks": ("mypy", "ruff")}
ARCHIVES = "/opt/archives"
IN_FLIGHT = 16
CALLS = (
    "ls -la /workspace/django",
    "grep -rn 'def slugify' /workspace/django --include='*.py'",
    "sed -n 440,470p /workspace/django/utils/text.py",
    "PYTHONPATH=/workspace python3 -c \"import django.utils.text as t; print(t.slugify('A b'))\"",
    "sed -i 's/def slugify(value/def slugify(value/' /workspace/django/utils/text.py",
    "PYTHONPATH=/opt/numeric python3 -c 'import numpy; print(numpy.arange(9).sum())'",
    "/opt/checks/bin/ruff check --quiet --isolated --exit-zero /workspace/django/utils/text.py",
    "python3 -m compileall -q /workspace/django/utils",
)


async def make_parts(place: Path) -> None:
    """The corpus: workspace and toolkits as tar.gz, and an image with these in it."""
    await in_thread("build", _make_parts, place)
    debian = await corpus.made("ondemand", ondemand.make_image)
    system = corpus.load_packed(debian / "layers.json")[ondemand.IMAGE]
    archives = corpus.load_packed(place / "archives.json")["archives"]
    layers = [(debian / system.path, system), (place / archives.path, archives)]
    corpus.write_layout(layers, place / "layout")


def _make_parts(place: Path) -> None:
    scratch = place / "scratch"
    held = scratch / "image" / ARCHIVES.removeprefix("/")
    held.mkdir(parents=True)
    corpus.install([WORKSPACE], scratch / WORKSPACE / "workspace")
    for name, programs in TOOLKITS.items():
        corpus.install(programs, scratch / name / "opt" / name)
    packed = {
        name: corpus.pack_tar(["-C", str(scratch / name), "."], place / f"{name}.tar.gz")
        for name in (WORKSPACE, *TOOLKITS)
    }
    corpus.save_packed(packed, place / "layers.json")
    for each in packed.values():
        (held / each.path).hardlink_to(place / each.path)
    image = corpus.pack_tar(["-C", str(scratch / "image"), "."], place / "archives.tar.gz")
    corpus.save_packed({"archives": image}, place / "archives.json")
    shutil.rmtree(scratch)


@dataclass(frozen=True, slots=True)
class Run:
    """One way, once."""

    seconds: float
    written_bytes: int


async def publish(place: Path, state: Path) -> int:
    """Fill a node; what the layers take of its disk, in bytes."""
    async with nodes.publishing(state, None) as published:
        await published.image(IMAGE, place / "layout")
        before = await in_thread("disk", corpus.disk_bytes, state)
        await published.layer("workspace", f"{WORKSPACE}:v1", place / f"{WORKSPACE}.tar.gz")
        for name in TOOLKITS:
            await published.layer("toolkit", f"{name}:v1", place / f"{name}.tar.gz")
        return await in_thread("disk", corpus.disk_bytes, state) - before


async def with_layers(client: DSecClient) -> Sandbox:
    """A sandbox that is created with them."""
    args = DSecContainerRunArgs(
        container_image=IMAGE,
        workspace=f"{WORKSPACE}:v1",
        toolkits=[f"{name}:v1" for name in TOOLKITS],
    )
    return await client.run_container(args)


async def with_archives(client: DSecClient) -> Sandbox:
    """A sandbox that unpacks them."""
    sandbox = await client.run_container(DSecContainerRunArgs(container_image=IMAGE))
    for name in (WORKSPACE, *TOOLKITS):
        unpacked = await sandbox.run_shell(f"tar -C / -xzf {ARCHIVES}/{name}.tar.gz", timeout=600)
        unpacked.check()
    return sandbox


async def measure(
    client: DSecClient, node: Server, count: int, make: Callable[[DSecClient], Awaitable[Sandbox]]
) -> Run:
    """Set up so many, have them all work, count, and end them."""
    limit = anyio.CapacityLimiter(IN_FLIGHT)
    live: list[Sandbox] = []

    async def set_up() -> None:
        async with limit:
            live.append(await make(client))

    async def work(sandbox: Sandbox) -> None:
        async with limit:
            for call in CALLS:
                (await sandbox.run_shell(call, timeout=600)).check()

    async def end(sandbox: Sandbox) -> None:
        async with limit:
            await sandbox.stop()

    disk = await in_thread("disk", corpus.disk_bytes, node.state)
    begun = time.perf_counter()
    await together(set_up for _ in range(count))
    took = time.perf_counter() - begun
    await together(partial(work, sandbox) for sandbox in live)
    written = await in_thread("disk", corpus.disk_bytes, node.state) - disk
    await together(partial(end, sandbox) for sandbox in live)
    say(f"{make.__name__}: {took:.2f} s, {written / MIB:.0f} MiB written by {count} sandboxes")
    return Run(took, written)


async def main(options: argparse.Namespace) -> dict[str, object]:
    """Measure in rounds, both ways in turn within a round."""
    place = await corpus.made("layers", make_parts)
    parts = corpus.load_packed(place / "layers.json")
    say(f"workspace and toolkits: {sum(p.tar_bytes for p in parts.values()) / MIB:.0f} MiB")
    state = Path(await in_thread("disk", tempfile.mkdtemp, None, "dsec-bench-"))
    erofs: list[Run] = []
    targz: list[Run] = []
    try:
        layer_bytes = await publish(place, state)
        with server(state=state) as node:
            async with DSecClient() as client:
                await measure(client, node, 1, with_layers)
                for number in range(options.rounds):
                    say(f"round {number + 1} of {options.rounds}")
                    erofs.append(await measure(client, node, options.sandboxes, with_layers))
                    targz.append(await measure(client, node, options.sandboxes, with_archives))
    finally:
        await in_thread("disk", shutil.rmtree, state)
    erofs_s, targz_s = (statistics.median(r.seconds for r in runs) for runs in (erofs, targz))
    written = [statistics.median(r.written_bytes for r in runs) for runs in (erofs, targz)]
    written[0] += layer_bytes
    return {
        "sandboxes": options.sandboxes,
        "erofs_s": round(erofs_s, 3),
        "targz_s": round(targz_s, 3),
        "ratio": round(targz_s / erofs_s, 1),
        "written_erofs_mb": round(written[0] / MIB, 1),
        "written_targz_mb": round(written[1] / MIB, 1),
        "written_ratio": round(written[1] / written[0], 1),
    }


if __name__ == "__main__":
    report(main, rounds=1, sandboxes=64)
