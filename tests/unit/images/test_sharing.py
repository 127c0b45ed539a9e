"""Layers on their way to the store and back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from dsec.base.errors import Conflict, DataUnavailable, NotFound, Unavailable, Unsupported
from dsec.images import sharing as module
from dsec.images.data import DataStore
from dsec.images.layers import LayerStore
from dsec.images.records import (
    DataRecord,
    ImageRecord,
    LayerRecord,
    NamedLayer,
    StoredLayer,
    decode,
    encode,
)
from dsec.images.sharing import Sharing
from dsec.images.store.interface import BlobRef
from dsec.images.stored import MAX_META_BYTES, MAX_TABLE_BYTES
from tests.unit.images.fake_store import FakeStore, SetClock, digest_of

pytestmark = pytest.mark.anyio
LAYER = digest_of(b"the layer")
META = b"metadata " * 1000
RAW = os.urandom(3 * 65536 + 4096)
IMAGE = ImageRecord(
    name="base:latest", digest=LAYER, layers=[LAYER], size_bytes=1, created_at=1.0, source="test"
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def quiet(_step: str, _done: int, _total: int) -> None:
    """Take no note of progress."""


@dataclass
class Node:
    root: Path
    layers: LayerStore
    data: DataStore
    sharing: Sharing

    async def publish(self) -> None:
        await self.sharing.publish_image(IMAGE, quiet)

    async def fetch(self) -> None:
        await self.sharing.fetch_layers([LAYER], "s1")

    def have_layer(self) -> None:
        """Import it."""
        raw, meta = self.root / "tmp/raw", self.root / "tmp/meta"
        raw.write_bytes(RAW)
        meta.write_bytes(META)
        device = DataRecord(digest=digest_of(RAW), size_bytes=len(RAW))
        self.data.put_raw(device, raw)
        record = LayerRecord(
            digest=LAYER,
            source="test",
            created_at=1.0,
            meta=BlobRef(digest_of(META), len(META)),
            devices=[device.digest],
        )
        self.layers.put(record, meta)

    def check_clean(self) -> None:
        assert list((self.root / "tmp").iterdir()) == []
        assert not self.data.pins.by(digest_of(RAW))


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(SetClock())


@pytest.fixture
def node(tmp_path: Path, store: FakeStore) -> Callable[..., Node]:
    def make(name: str, *, direct: bool = False, layer: bool = False) -> Node:
        root = tmp_path / name
        layers, data = LayerStore(root, root / "run"), DataStore(root)
        layers.open()
        data.open()
        sharing = Sharing(store, root, layers, data, direct=direct, clock=store.clock)
        made = Node(root, layers, data, sharing)
        if layer:
            made.have_layer()
        return made

    return make


def document(store: FakeStore) -> StoredLayer:
    return decode(store.documents["layer", LAYER], StoredLayer, "layer")


def raw_is_named(store: FakeStore) -> bool:
    packed = document(store).data[0].packed
    assert packed is not None
    assert not packed.raw or digest_of(RAW) in store.blobs
    return packed.raw


async def test_what_is_published_can_be_fetched(
    store: FakeStore, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READ_BYTES", 50)
    publisher, cold = node("publisher", layer=True), node("cold")
    await publisher.publish()
    await cold.fetch()
    assert cold.layers.meta(LAYER).read_bytes() == META
    assert cold.data.table(digest_of(RAW)) is not None
    assert cold.data.raw(digest_of(RAW)) is None
    assert cold.layers.pins.by(LAYER) == {"s1"}
    assert store.calls["read_blob"] > 3  # in parts
    for each in (publisher, cold):
        each.check_clean()
    assert store.names("intent") == []


async def test_publishing_again_keeps_what_others_mounted(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    await node("direct", direct=True, layer=True).publish()
    assert raw_is_named(store)
    before, body = dict(store.blobs), store.documents["layer", LAYER]
    await node("other", layer=True).publish()
    assert (store.blobs, store.documents["layer", LAYER]) == (before, body)
    assert store.calls["put_blob"] == 4  # nothing was packed or sent again


async def test_a_direct_node_adds_the_raw_data(store: FakeStore, node: Callable[..., Node]) -> None:
    await node("other", layer=True).publish()
    before = document(store)
    assert not raw_is_named(store)
    await node("direct", direct=True, layer=True).publish()
    assert raw_is_named(store)
    after = document(store)
    assert (after.meta, after.layer) == (before.meta, before.layer)
    assert store.calls["put_blob"] == 4


async def test_two_who_publish_at_once_lose_nothing(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    for turn in range(5):
        nodes = [node(f"d{turn}", direct=True, layer=True), node(f"o{turn}", layer=True)]
        store.documents.clear()
        store.blobs.clear()
        async with anyio.create_task_group() as group:
            for each in nodes if turn % 2 else reversed(nodes):
                group.start_soon(each.publish)
        assert raw_is_named(store)


async def test_the_last_moment_before_a_document_is_written(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    direct, other = node("direct", direct=True, layer=True), node("other", layer=True)

    async def overtake(call: str, about: str) -> None:
        if (call, about) == ("put_document", f"layer {LAYER}"):
            store.heal()
            await direct.publish()

    store.before = overtake
    await other.publish()
    assert raw_is_named(store)


@pytest.mark.parametrize("lost", ["meta", "pack", "table"])
async def test_a_document_whose_blobs_are_lost_is_made_whole(
    store: FakeStore, node: Callable[..., Node], lost: str
) -> None:
    publisher = node("publisher", layer=True)
    await publisher.publish()
    known = document(store)
    packed = known.data[0].packed
    assert packed is not None
    ref = {"meta": known.meta, "pack": packed.pack, "table": packed.table}[lost]
    del store.blobs[ref.digest]
    await publisher.publish()
    assert ref.digest in store.blobs


@pytest.mark.parametrize("body", [b"{", b"{}"])
async def test_a_document_nobody_can_read_is_replaced(
    store: FakeStore, node: Callable[..., Node], body: bytes
) -> None:
    store.documents["layer", LAYER] = body
    await node("publisher", layer=True).publish()
    await node("cold").fetch()


async def test_an_image_that_is_only_in_the_store_gets_another_name(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    await node("publisher", layer=True).publish()
    await node("cold").sharing.publish_image(replace(IMAGE, name="again:latest"), quiet)
    assert store.names("image") == ["again:latest", "base:latest"]
    with pytest.raises(NotFound):
        await node("cold2").sharing.publish_image(replace(IMAGE, layers=[digest_of(b"")]), quiet)


async def test_a_layer_whose_data_is_not_known_is_fetched_again(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    await node("publisher", layer=True).publish()
    cold = node("cold")
    await cold.fetch()
    cold.data.collect(set)  # as an interrupted removal leaves it
    assert not cold.data.has(digest_of(RAW))
    await cold.fetch()
    assert cold.data.has(digest_of(RAW))
    asked = store.calls.total()
    await cold.fetch()
    assert store.calls.total() == asked


def lie(change: str, stored: StoredLayer) -> StoredLayer:  # noqa: PLR0911 - one for each lie
    layer, data = stored.layer, stored.data[0]
    packed = data.packed
    assert packed is not None
    large = BlobRef(packed.table.digest, MAX_TABLE_BYTES + 36)
    match change:
        case "large metadata":
            return replace(stored, meta=BlobRef(stored.meta.digest, MAX_META_BYTES + 1))
        case "large image":
            meta = BlobRef(layer.meta.digest, MAX_META_BYTES + 1)
            return replace(stored, layer=replace(layer, meta=meta))
        case "another layer":
            return replace(stored, layer=replace(layer, digest=digest_of(b"x")))
        case "another device":
            return replace(stored, layer=replace(layer, devices=["sha256:x"]))
        case "large table":
            packed = replace(packed, table=large)
        case "short table":
            packed = replace(packed, table=BlobRef(packed.table.digest, 36))
        case "odd chunks":
            packed = replace(packed, chunk_bytes=0)
        case "a path":
            packed = replace(packed, pack=BlobRef("../../etc/passwd", 1))
        case "no data":
            return replace(stored, data=[replace(data, size_bytes=0)])
        case _:
            return replace(stored, data=[replace(data, packed=None)])
    return replace(stored, data=[replace(data, packed=packed)])


@pytest.mark.parametrize(
    "change",
    [
        "large metadata",
        "large image",
        "another layer",
        "another device",
        "large table",
        "short table",
        "odd chunks",
        "a path",
        "no data",
        "not packed",
    ],
)
async def test_what_cannot_be_is_not_read(
    store: FakeStore, node: Callable[..., Node], change: str
) -> None:
    await node("publisher", layer=True).publish()
    store.documents["layer", LAYER] = encode(lie(change, document(store)))
    cold, asked = node("cold"), store.calls["read_blob"]
    with pytest.raises(DataUnavailable):
        await cold.fetch()
    assert store.calls["read_blob"] == asked
    assert cold.layers.digests() == cold.data.digests() == []
    cold.check_clean()


@pytest.mark.parametrize("damage", ["gone", "changed"])
async def test_a_blob_that_is_not_what_it_should_be(
    store: FakeStore, node: Callable[..., Node], damage: str
) -> None:
    await node("publisher", layer=True).publish()
    meta = document(store).meta
    if damage == "gone":
        del store.blobs[meta.digest]
    else:
        store.blobs[meta.digest] = bytes(meta.size_bytes)
    cold = node("cold")
    with pytest.raises(DataUnavailable):
        await cold.fetch()
    assert cold.layers.digests() == []
    cold.check_clean()


async def counted(store: FakeStore, work: Callable[[], Any]) -> int:
    before = store.calls.total()
    await work()
    return store.calls.total() - before


async def failing(store: FakeStore, work: Callable[[], Any], at: int) -> None:
    calls = 0

    async def fail(_call: str, _about: str) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 == at:
            raise Unavailable("gone")

    store.before = fail
    with contextlib.suppress(Unavailable):
        await work()
    store.heal()


async def test_every_call_of_the_store_fails_once(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    calls = await counted(store, node("first", direct=True, layer=True).publish)
    for at in range(calls):
        store.documents.clear()
        store.blobs.clear()
        publisher = node(f"p{at}", direct=True, layer=True)
        await failing(store, publisher.publish, at)
        publisher.check_clean()
        if ("image", IMAGE.name) in store.documents:  # what can be found can be read
            await node(f"c{at}").fetch()
        await publisher.publish()
        assert raw_is_named(store)
    for at in range(await counted(store, node("second").fetch)):
        cold = node(f"f{at}")
        await failing(store, cold.fetch, at)
        cold.check_clean()
        assert cold.layers.pins.by(LAYER) == {"s1"}
        await cold.fetch()
        assert cold.layers.has(LAYER)


# -- names -------------------------------------------------------------------------------------


def version(name: str = "lint:v1", at: float = 1.0, digest: str = LAYER) -> NamedLayer:
    return NamedLayer(
        kind="toolkit", name=name, digest=digest, size_bytes=1, created_at=at, source="test"
    )


async def test_a_version_means_one_thing(store: FakeStore, node: Callable[..., Node]) -> None:
    one, two = node("one", layer=True), node("two", layer=True)
    first = await one.sharing.publish_named(version(at=1.0), quiet)
    assert await two.sharing.publish_named(version(at=2.0), quiet) == first
    store.documents["toolkit", "lint:v1"] = encode(version(digest=digest_of(b"other")))
    with pytest.raises(Conflict, match="another content"):
        await two.sharing.publish_named(version(), quiet)


async def test_a_name_is_removed_if_it_still_means_the_same(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    sharing = node("one", layer=True).sharing
    await sharing.publish_image(IMAGE, quiet)
    assert (await sharing.names.image(IMAGE.name)).digest == LAYER
    moved = encode(replace(IMAGE, digest=digest_of(b"new")))
    store.documents["image", IMAGE.name] = moved
    await sharing.forget("image", IMAGE.name, LAYER)
    assert store.documents["image", IMAGE.name] == moved
    await sharing.forget("image", IMAGE.name, digest_of(b"new"))
    assert store.names("image") == []
    with pytest.raises(NotFound):
        await sharing.names.image(IMAGE.name)
    await sharing.forget("image", IMAGE.name, LAYER)


async def test_a_store_that_keeps_names_says_so(
    store: FakeStore, node: Callable[..., Node]
) -> None:
    sharing = node("one", layer=True).sharing
    await sharing.publish_image(IMAGE, quiet)
    store.deletes = False
    with pytest.raises(Unsupported):
        await sharing.forget("image", IMAGE.name, LAYER)


async def test_layers_that_were_collected(store: FakeStore, node: Callable[..., Node]) -> None:
    sharing = node("one", layer=True).sharing
    await sharing.publish_image(IMAGE, quiet)
    await sharing.still_there([LAYER, LAYER])
    del store.documents["layer", LAYER]
    with pytest.raises(NotFound):
        await sharing.still_there([LAYER])
