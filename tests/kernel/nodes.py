"""Nodes that share a store: images, layers and a filler each, without an edge over them."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.images.lazy.config import FillerConfig
from dsec.images.lazy.node import NodeFiller
from dsec.images.records import Environment
from dsec.images.service import ImageService, Shared, finish
from dsec.images.store.interface import BlobStore
from dsec.images.store.opening import open_store
from dsec.linux import mounts
from dsec.wire.edge_v1 import LayerEvent
from dsec.wire.public_v1 import EnvironmentRef, LayerKind, LayerReady, LayerView

MIB = 1 << 20


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A tar of files, their directories implied."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(content), 0o644, 1_700_000_000
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


async def stream(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), MIB):
        yield data[at : at + MIB]


async def published(images: ImageService, kind: LayerKind, name: str, data: bytes) -> LayerView:
    """Publish a version and wait."""
    last: LayerEvent | None = None
    async for event in images.publish_layer(kind, name, "", stream(data)):
        last = event
    assert isinstance(last, LayerReady)
    return last.layer


async def imported(images: ImageService, name: str, data: bytes) -> None:
    """Import a root file system and wait."""
    await finish(images.import_archive(name, stream(data)))


class Node:
    """One node's directories; `running` opens it, as often as one likes."""

    def __init__(self, name: str, store: Path | str, base: Path) -> None:
        self.name = name
        self.store_url = str(store)
        self.state = base / name
        self.state.mkdir()
        # Short: a Unix socket's path has at most 107 bytes.
        self.run = Path(tempfile.mkdtemp(prefix="dsec-n"))
        self.options: dict[str, object] = {"attempt_timeout_s": 1.0, "attempts": 2}
        self.direct = False
        self.record = False

    @property
    def config(self) -> FillerConfig:
        return FillerConfig(
            store=self.store_url,
            cache=str(self.state / "cache"),
            run=str(self.run),
            **self.options,  # type: ignore[arg-type]
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ImageService]:
        store: BlobStore = open_store(self.store_url)
        filler = NodeFiller(self.config)
        shared = Shared(
            store=store, direct=self.direct, filler=filler, record=self.record, node=self.name
        )
        try:
            async with ImageService(self.state / "images", self.run, shared=shared) as images:
                images.environments.settled()
                yield images
        finally:
            await filler.aclose()
            await store.aclose()

    def clean(self) -> None:
        """Take everything away; nothing is mounted any more."""
        assert mounts.mounts_under(self.run) == []
        shutil.rmtree(self.run)


@asynccontextmanager
async def seen(
    images: ImageService, wanted: EnvironmentRef, owner: str, place: Path, *, record: bool = False
) -> AsyncIterator[Path]:
    """An environment as a sandbox sees it: mounted, overlaid, released again."""
    environment = await images.environments.compose(wanted)
    async with seen_as(images, environment, owner, place, record=record) as root:
        yield root


@asynccontextmanager
async def seen_as(
    images: ImageService, environment: Environment, owner: str, place: Path, *, record: bool = False
) -> AsyncIterator[Path]:
    layers = await images.environments.mount(environment, owner, record=record)
    root = place / owner
    root.mkdir()
    if len(layers) == 1:
        layers = [*layers, empty(place)]
    mounts.mount_overlay_view([str(layer) for layer in layers], root)
    try:
        yield root
    finally:
        mounts.umount(root, detach=True)
        root.rmdir()
        await images.environments.release(owner)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def node(tmp_path: Path, store: Path) -> Iterator[Callable[[str], Node]]:
    """Nodes of one store by name, each made once."""
    made: dict[str, Node] = {}

    def make(name: str) -> Node:
        if name not in made:
            made[name] = Node(name, store, tmp_path)
        return made[name]

    yield make
    for one in made.values():
        one.clean()


def empty(place: Path) -> Path:
    (place / "empty").mkdir(exist_ok=True)
    return place / "empty"


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress and differ by seed."""
    import random

    return random.Random(seed).randbytes(size)


def read_all(root: Path) -> Iterator[tuple[str, bytes]]:
    for directory, _, files in os.walk(root):
        for name in sorted(files):
            path = Path(directory) / name
            yield str(path.relative_to(root)), path.read_bytes()
