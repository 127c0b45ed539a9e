"""Two hundred sandboxes over a hundred environments, none of which is on the node.

The environments are those of `bench.burst_corpus`; each is run by two sandboxes, far apart in the
order. 32 sandboxes are on their way at a time, in all ways alike: one is created, does the first
tool calls of a task on its workspace and toolkits, and stays until all are done. The time is the
wall time for all two hundred. The store is a real server behind a link of 5 ms and 1 Gb/s, the
same for both that read from it:

- lazy: a node that has nothing but the store's address; no traces exist and none are recorded.
- eager: each distinct layer is downloaded compressed and unpacked, once, three at a time as Docker
  does it; a sandbox's tool calls run when its layers are there (`bench.eager` says in what, and
  that it is less than what the product's own sandboxes are).
- local: a node that has everything, none of it in memory.

Written is what each way allocated on the node's disk, what the sandboxes wrote included.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from bench import burst_corpus, corpus, eager, nodes
from bench.burst_corpus import TOOLKITS, WORKSPACES, Environment, environments
from bench.corpus import MIB, Packed
from bench.harness import report, say, server
from bench.store_server import Kind, StoreServer, store_server, usual_kind
from dsec.base.errors import DsecError
from dsec.images.locks import KeyedLock
from dsec.kit.blocking import in_thread
from dsec.kit.together import together
from dsec.sdk import DSecClient, DSecContainerRunArgs, Sandbox

IN_FLIGHT = 32
UNPACKING = 3
PUBLISHING = 3


@dataclass(frozen=True, slots=True)
class Run:
    """One way, once."""

    seconds: float
    written_bytes: int = 0
    failures: int = 0


def tool_calls(environment: Environment) -> list[str]:
    """What an agent does first: look around, search, read, try to import and compile."""
    module = environment.workspace.removeprefix("workspace-")
    package = f"/workspace/{module}"
    kits = [f"/opt/{kit.removeprefix('toolkit-')}" for kit in environment.toolkits]
    path = shlex.quote(":".join(["/workspace", *kits]))
    script = f"import py_compile, {module} as it; print(py_compile.compile(it.__file__))"
    return [
        f"ls -la /workspace {package} {' '.join(kits)}",
        "find /workspace -name '*.py' | wc -l",
        "grep -rn --include='*.py' 'def __init__' /workspace | wc -l",
        f"sed -n 1,60p {package}/__init__.py",
        f"PYTHONPATH={path} python3 -c '{script}'",
        f"head -c 4096 {kits[0]}/*/__init__.py",
    ]


# -- the store and the node that has everything --------------------------------------------------


async def fill(corpus_place: Path, kind: Kind, place: Path) -> None:
    """Import all of it into a node's state, and put it and the compressed layers into a store."""
    packed = corpus.load_packed(corpus_place / "layers.json")
    async with store_server(place / "store", kind) as serving, serving.past_link() as store:
        async with nodes.publishing(place / "node", store) as published:
            say("publishing layers and images")
            await published.image(nodes.WARM, nodes.write_warm_image(place))
            for name in WORKSPACES:
                file = corpus_place / f"workspace-{name}.tar.gz"
                await published.layer("workspace", f"workspace-{name}:v1", file)
            for name in TOOLKITS:
                file = corpus_place / f"toolkit-{name}.tar.gz"
                await published.layer("toolkit", f"toolkit-{name}:v1", file)
            await _some_at_once(
                partial(published.image, each.image, corpus_place / "layouts" / each.image)
                for each in environments()
            )
            say(await published.describe_chunks())
        say("publishing compressed layers")
        await _some_at_once(
            partial(serving.keep, corpus_place / each.path, each.digest) for each in packed.values()
        )


async def _some_at_once(works: Iterable[Callable[[], Awaitable[object]]]) -> None:
    limit = anyio.CapacityLimiter(PUBLISHING)

    async def one(work: Callable[[], Awaitable[object]]) -> None:
        async with limit:
            await work()

    await together(partial(one, work) for work in works)


# -- the ways ------------------------------------------------------------------------------------


def schedule(count: int) -> list[Environment]:
    """Which environment each sandbox has: all of them in turn."""
    return list(itertools.islice(itertools.cycle(environments()), count))


class Burst:
    """Sandboxes of the product, many at once."""

    def __init__(self, client: DSecClient) -> None:
        self._client = client
        self._limit = anyio.CapacityLimiter(IN_FLIGHT)
        self._live: list[Sandbox] = []
        self.failures = 0

    async def run(self, wanted: Sequence[Environment]) -> float:
        """Seconds until all are done."""
        begun = time.perf_counter()
        await together(partial(self._counted, each) for each in wanted)
        return time.perf_counter() - begun

    async def _counted(self, environment: Environment) -> None:
        async with self._limit:
            try:
                await self._one(environment)
            except (DsecError, RuntimeError) as error:
                self.failures += 1
                say(f"{environment.image}: {error}")

    async def _one(self, environment: Environment) -> None:
        args = DSecContainerRunArgs(
            container_image=environment.image,
            workspace=f"{environment.workspace}:v1",
            toolkits=[f"{kit}:v1" for kit in environment.toolkits],
            memory_limit_mb=512,
            pids_limit=128,
        )
        sandbox = await self._client.run_container(args)
        self._live.append(sandbox)
        for call in tool_calls(environment):
            result = await sandbox.run_shell(call)
            if result.exit_code:
                raise RuntimeError(f"{call}: {result.stderr or result.stdout}")

    async def stop(self) -> None:
        """Stop them all."""

        async def one(sandbox: Sandbox) -> None:
            async with self._limit:
                await sandbox.stop()

        await together(partial(one, sandbox) for sandbox in self._live)


async def lazy(store: StoreServer, wanted: Sequence[Environment]) -> Run:
    """The product, on a node that has nothing."""
    link = store.link.read()
    with nodes.lazy_node(store) as node:
        async with DSecClient() as client:
            await nodes.warm_up(client)
            disk = await in_thread("disk", corpus.disk_bytes, node.state)
            burst = Burst(client)
            took = await burst.run(wanted)
            written = await in_thread("disk", corpus.disk_bytes, node.state) - disk
            await burst.stop()
    say(f"lazy: {took:.2f} s, {written / MIB:.0f} MiB written, {store.link.read().since(link)}")
    return Run(took, written, burst.failures)


async def local(state: Path, wanted: Sequence[Environment]) -> Run:
    """The product, on a node that has all of it."""
    await in_thread("disk", corpus.drop_cached, state / "images")
    with server(state=state):
        async with DSecClient() as client:
            await nodes.warm_up(client)
            burst = Burst(client)
            took = await burst.run(wanted)
            await burst.stop()
    say(f"local: {took:.2f} s")
    return Run(took, 0, burst.failures)


class Download:
    """A node that downloads and unpacks what its sandboxes stand on."""

    def __init__(self, store: StoreServer, packed: dict[str, Packed], place: Path) -> None:
        self._store = store
        self._packed = packed
        self._place = place
        self._unpacking = anyio.CapacityLimiter(UNPACKING)
        self._limit = anyio.CapacityLimiter(IN_FLIGHT)
        self._layers = KeyedLock()
        self.failures = 0

    async def run(self, wanted: Sequence[Environment]) -> float:
        """Seconds until all are done."""
        begun = time.perf_counter()
        await together(partial(self._one, str(n), each) for n, each in enumerate(wanted))
        return time.perf_counter() - begun

    async def _one(self, name: str, environment: Environment) -> None:
        async with self._limit:
            await together(partial(self._layer, layer) for layer in environment.layers)
            layers = [self._place / layer for layer in reversed(environment.layers)]
            script = "\n".join(["set -e", *tool_calls(environment)])
            command = ["bash", "-c", script]
            try:
                await eager.run_in(layers, self._place / "sandboxes" / name, command)
            except subprocess.CalledProcessError as error:
                self.failures += 1
                say(f"{environment.image}: {error.stderr.decode(errors='replace')[-500:]}")

    async def _layer(self, name: str) -> None:
        async with self._layers.holding(name):
            if not await in_thread("disk", (self._place / name).exists):
                async with self._unpacking:
                    url = self._store.blob_url(self._packed[name].digest)
                    await eager.fetch_and_unpack(url, self._place / name)


async def download_all(
    store: StoreServer, packed: dict[str, Packed], wanted: Sequence[Environment]
) -> Run:
    """Download and unpack."""
    scratch = Path(await in_thread("disk", tempfile.mkdtemp, None, "dsec-bench-"))
    link = store.link.read()
    try:
        download = Download(store, packed, scratch)
        took = await download.run(wanted)
        written = await in_thread("disk", corpus.disk_bytes, scratch)
    finally:
        await in_thread("disk", shutil.rmtree, scratch)
    say(f"eager: {took:.2f} s, {written / MIB:.0f} MiB written, {store.link.read().since(link)}")
    return Run(took, written, download.failures)


async def main(options: argparse.Namespace) -> dict[str, object]:
    """Measure in rounds, each way in turn within a round."""
    place = await corpus.made("burst", burst_corpus.make)
    packed = corpus.load_packed(place / "layers.json")
    filled = await corpus.filled(f"burst-{options.store}", partial(fill, place, options.store))
    wanted = schedule(options.sandboxes)
    runs: dict[str, list[Run]] = {"lazy": [], "eager": [], "local": []}
    async with store_server(filled / "store", options.store) as store:
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            runs["lazy"].append(await lazy(store, wanted))
            runs["local"].append(await local(filled / "node", wanted))
            runs["eager"].append(await download_all(store, packed, wanted))
    seconds = {way: statistics.median(run.seconds for run in runs[way]) for way in runs}
    written = {way: statistics.median(run.written_bytes for run in runs[way]) for way in runs}
    return {
        "images": len({each.image for each in wanted}),
        "sandboxes": len(wanted),
        "lazy_s": round(seconds["lazy"], 2),
        "eager_s": round(seconds["eager"], 2),
        "local_s": round(seconds["local"], 2),
        "ratio": round(seconds["eager"] / seconds["lazy"], 2),
        "written_lazy_mb": round(written["lazy"] / MIB),
        "written_eager_mb": round(written["eager"] / MIB),
        "failures": sum(run.failures for way in runs for run in runs[way]),
    }


if __name__ == "__main__":
    report(main, rounds=1, sandboxes=200, store=usual_kind())
