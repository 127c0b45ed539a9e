"""Nodes of the benchmarks about environments: one that shares a store, one that has all of it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import anyio

from bench.harness import Server, rootfs_tar, server
from bench.link import LinkProcess, Reading
from bench.store_server import StoreServer
from dsec.images.pack import ENTRY_BYTES
from dsec.images.service import ImageService, Shared
from dsec.images.store.interface import BlobStore
from dsec.kit.blocking import in_thread
from dsec.sdk import DSecClient, DSecContainerRunArgs
from dsec.wire.public_v1 import LayerKind

WARM = "warm"
"""An image of another content, for what a node does once whatever runs on it."""
QUIET_S = 0.2


class Published:
    """Fills a node's state, and with it the store, without a server in between."""

    def __init__(self, images: ImageService) -> None:
        self._images = images

    async def image(self, name: str, path: Path) -> None:
        """Import an image."""
        async for _event in self._images.import_path(path, name):
            pass

    async def mounts(self, name: str) -> list[str]:
        """What is mounted for an image, bottom first."""
        record = await self._images.resolve(name)
        return record.mounts or record.layers

    async def layer(self, kind: LayerKind, name: str, tar: Path) -> None:
        """Publish a workspace or toolkit from a tar."""
        async for _event in self._images.publish_layer(kind, name, "", _pieces(tar)):
            pass

    async def describe_chunks(self) -> str:
        """How many chunks all layers have, and how many of them differ."""
        return await in_thread("disk", self._describe_chunks)

    def _describe_chunks(self) -> str:
        total = 0
        distinct: set[bytes] = set()
        for layer in self._images.layers.records():
            for device in () if layer.merged else layer.devices:
                table = self._images.data.table(device)
                entries = table.read_bytes() if table else b""
                total += len(entries) // ENTRY_BYTES
                distinct.update(
                    entries[at : at + ENTRY_BYTES] for at in range(0, len(entries), ENTRY_BYTES)
                )
        return f"{total} chunks in all layers, {len(distinct)} distinct"


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as stream:
        while piece := await in_thread("disk", stream.read, 1 << 20):
            yield piece


@contextlib.asynccontextmanager
async def publishing(state: Path, store: BlobStore | None) -> AsyncIterator[Published]:
    """Fill a state directory (kept) and the store."""
    run = state / "publishing"
    await in_thread("disk", lambda: run.mkdir(parents=True, exist_ok=True))
    shared = Shared(store=store, record=False, node="bench-publisher")
    async with ImageService(state / "images", run, shared=shared) as images:
        yield Published(images)


def write_warm_image(place: Path) -> Path:
    """The small image `WARM` as a file."""
    file = place / "warm.tar"
    if not file.exists():
        file.write_bytes(rootfs_tar())
    return file


@contextlib.contextmanager
def lazy_node(store: StoreServer) -> Iterator[Server]:
    """A node that has nothing but the store's address, and records no traces."""
    with _configured("record_traces = false\n") as config:
        with server(["--store", store.url(by_link=True), *config]) as it:
            yield it


@contextlib.contextmanager
def _configured(text: str) -> Iterator[list[str]]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        yield ["--config", file.name]


async def warm_up(client: DSecClient) -> None:
    """Have the node start what it starts once: its helper, its filler, its connections."""
    args = DSecContainerRunArgs(container_image=WARM, memory_limit_mb=256, pids_limit=128)
    async with await client.run_container(args) as sandbox:
        await sandbox.exec(["/bin/echo", "1"])


async def timed_output(
    client: DSecClient, args: DSecContainerRunArgs, command: Sequence[str]
) -> tuple[float, Callable[[], Awaitable[object]]]:
    """Seconds from asking for a sandbox to a command's output, and what ends the sandbox."""
    begun = time.perf_counter()
    sandbox = await client.run_container(args)
    result = await sandbox.exec(command)
    took = time.perf_counter() - begun
    if result.exit_code or result.stdout != "1\n":
        raise RuntimeError(f"unexpected output {result!r}")
    return took, sandbox.stop


async def quiet(link: LinkProcess) -> Reading:
    """Wait until nothing passes the link any more."""
    last = link.read()
    while True:
        await anyio.sleep(QUIET_S)
        now = link.read()
        if (now.requests, now.down_bytes) == (last.requests, last.down_bytes):
            return now
        last = now
