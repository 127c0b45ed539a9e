"""From asking for a sandbox to the first output, when nothing of its image is on the node.

The image is a Debian with python3, gcc, perl and git, built over the node's own package sources and
kept as one layer. The store is a real server behind a link of 5 ms and 1 Gb/s (`bench.link`), the
same for all ways:

- lazy: a node that has nothing but the store's address; no boot trace exists and none is recorded.
- traced: another such node, after some other node has recorded a trace of the same command.
- eager: the compressed layer is downloaded and unpacked to the node's disk (`bench.eager`), then
  the command runs on it.
- local: a node that has the whole image, none of it in memory.

Each round measures all of them once, each time on a node (state directory, server, filler) made
anew. A node has run one small sandbox of another image before, so that what a node does once is not
counted. The figures are medians. Bytes are what passed the link, metadata included, until it was
quiet; written is what the way allocated on the node's disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import corpus, eager, nodes
from bench.corpus import MIB, Packed
from bench.harness import report, say, server
from bench.store_server import Kind, StoreServer, store_server, usual_kind
from dsec.images.traces import trace_key
from dsec.kit.blocking import in_thread
from dsec.sdk import DSecClient, DSecContainerRunArgs

IMAGE = "ondemand"
TRACE = "bench"
PACKAGES = ("python3", "gcc", "libc6-dev", "perl", "git")
COMMAND = ["python3", "-c", "print(1)"]


@dataclass(frozen=True, slots=True)
class Run:
    """One way, once."""

    seconds: float
    link_bytes: int
    written_bytes: int


async def make_image(place: Path) -> None:
    """The corpus: the layer, and an OCI layout around it."""
    root = place / "root"
    await corpus.debian_tree(PACKAGES, root)
    arguments = ["-C", str(root), "--sort=name", "."]
    packed = await in_thread("build", corpus.pack_tar, arguments, place / "layer.tar.gz")
    corpus.save_packed({IMAGE: packed}, place / "layers.json")
    corpus.write_layout([(place / packed.path, packed)], place / "layout")
    await in_thread("disk", shutil.rmtree, root)


async def fill(corpus_place: Path, kind: Kind, place: Path) -> None:
    """Import the image into a node's state, and put it and its compressed layer into a store."""
    packed = corpus.load_packed(corpus_place / "layers.json")[IMAGE]
    async with store_server(place / "store", kind) as serving, serving.past_link() as store:
        async with nodes.publishing(place / "node", store) as published:
            await published.image(nodes.WARM, nodes.write_warm_image(place))
            await published.image(IMAGE, corpus_place / "layout")
        await serving.keep(corpus_place / packed.path, packed.digest)


def _args(*, trace: str | None = None, record: bool = False) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image=IMAGE, memory_limit_mb=1024, trace=trace, record_trace=record
    )


async def on_demand(store: StoreServer, trace: str | None) -> Run:
    """The product, on a node that has nothing."""
    with nodes.lazy_node(store) as node:
        async with DSecClient() as client:
            await nodes.warm_up(client)
            link = await nodes.quiet(store.link)
            disk = await in_thread("disk", corpus.disk_bytes, node.state)
            took, stop = await nodes.timed_output(client, _args(trace=trace), COMMAND)
            passed = (await nodes.quiet(store.link)).since(link)
            written = await in_thread("disk", corpus.disk_bytes, node.state) - disk
            await stop()
    say(f"{'traced' if trace else 'lazy'}: {took:.3f} s, {passed}, {written >> 10} KiB written")
    return Run(took, passed.down_bytes, written)


async def local(state: Path) -> Run:
    """The product, on a node that has all of it."""
    await in_thread("disk", corpus.drop_cached, state / "images")
    with server(state=state):
        async with DSecClient() as client:
            await nodes.warm_up(client)
            took, stop = await nodes.timed_output(client, _args(), COMMAND)
            await stop()
    say(f"local: {took:.3f} s")
    return Run(took, 0, 0)


async def download_all(store: StoreServer, packed: Packed) -> Run:
    """Download and unpack."""
    scratch = Path(await in_thread("disk", tempfile.mkdtemp, None, "dsec-bench-"))
    link = store.link.read()
    try:
        begun = time.perf_counter()
        await eager.fetch_and_unpack(store.blob_url(packed.digest), scratch / "root")
        said = await eager.run_in([scratch / "root"], scratch / "sandbox", COMMAND)
        took = time.perf_counter() - begun
        if said != b"1\n":
            raise RuntimeError(f"unexpected output {said!r}")
        passed = (await nodes.quiet(store.link)).since(link)
        written = await in_thread("disk", corpus.disk_bytes, scratch)
    finally:
        await in_thread("disk", shutil.rmtree, scratch)
    say(f"eager: {took:.3f} s, {passed}, {written >> 20} MiB written")
    return Run(took, passed.down_bytes, written)


async def record(store: StoreServer, state: Path) -> None:
    """Have a node record a trace of the command, under a name that only `traced` asks by."""
    with nodes.lazy_node(store):
        async with DSecClient() as client:
            _took, stop = await nodes.timed_output(client, _args(trace=TRACE, record=True), COMMAND)
            await stop()
    async with nodes.publishing(state, None) as published:
        nameless = trace_key(await published.mounts(IMAGE), "")
    async with store.past_link() as direct:
        await direct.delete_document("trace", nameless)


def _figures(
    packed: Packed, lazy: Sequence[Run], traced: Sequence[Run], eagers: Sequence[Run], here: float
) -> dict[str, object]:
    def median(runs: Sequence[Run], name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in runs))

    lazy_s, traced_s, eager_s = (median(runs, "seconds") for runs in (lazy, traced, eagers))
    return {
        "image_mb": round(packed.tar_bytes / MIB, 1),
        "eager_s": round(eager_s, 3),
        "lazy_s": round(lazy_s, 3),
        "traced_s": round(traced_s, 3),
        "bytes_eager": int(median(eagers, "link_bytes")),
        "bytes_lazy": int(median(lazy, "link_bytes")),
        "bytes_traced": int(median(traced, "link_bytes")),
        "written_eager": int(median(eagers, "written_bytes")),
        "written_lazy": int(median(lazy, "written_bytes")),
        "local_s": round(here, 3),
        "ratio_lazy": round(eager_s / lazy_s, 1),
        "ratio_traced": round(eager_s / traced_s, 1),
    }


async def main(options: argparse.Namespace) -> dict[str, object]:
    """Measure in rounds, each way in turn within a round."""
    place = await corpus.made("ondemand", make_image)
    packed = corpus.load_packed(place / "layers.json")[IMAGE]
    filled = await corpus.filled(f"ondemand-{options.store}", partial(fill, place, options.store))
    state = filled / "node"
    lazy: list[Run] = []
    traced: list[Run] = []
    eagers: list[Run] = []
    locals_: list[Run] = []
    async with store_server(filled / "store", options.store) as store:
        await record(store, state)
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            lazy.append(await on_demand(store, None))
            traced.append(await on_demand(store, TRACE))
            locals_.append(await local(state))
            eagers.append(await download_all(store, packed))
        say(f"the link took {store.link.read().cpu_s:.2f} s of processor time in all")
    here = statistics.median(run.seconds for run in locals_)
    return _figures(packed, lazy, traced, eagers, here)


if __name__ == "__main__":
    report(main, rounds=5, store=usual_kind())
