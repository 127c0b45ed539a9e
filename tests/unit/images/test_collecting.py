"""What goes from the store and what stays, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio.testing

from dsec.base.errors import NotFound, Unavailable
from dsec.images.collecting import (
    FRESH_BLOB_S,
    TRAJECTORY_LASTS_S,
    USE_LASTS_S,
    Use,
    collect,
)
from dsec.images.records import (
    DataRecord,
    ImageRecord,
    KeptTrajectory,
    LayerRecord,
    NamedLayer,
    Packed,
    StoredLayer,
    encode,
)
from dsec.images.stored import refs_of
from dsec.wire.public_v1 import CollectReport
from tests.unit.images.fake_store import AnyClock, FakeStore, digest_of

pytestmark = pytest.mark.anyio
CLOCK = AnyClock()
OLD = 2 * FRESH_BLOB_S
NAMED, USED, IDLE = (digest_of(name) for name in (b"named", b"used", b"idle"))


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def add_layer(store: FakeStore, digest: str) -> StoredLayer:
    """A layer with one device, raw data included; its blobs are its own."""
    meta = store.add(b"meta of " + digest.encode(), OLD)
    raw = store.add(digest.encode().ljust(4096), OLD)
    packed = Packed(
        pack=store.add(b"pack of " + digest.encode(), OLD),
        table=store.add(digest.encode()[:36], OLD),
        chunk_bytes=65536,
        raw=True,
    )
    stored = StoredLayer(
        layer=LayerRecord(
            digest=digest, source="test", created_at=1.0, meta=meta, devices=[raw.digest]
        ),
        meta=meta,
        data=[DataRecord(digest=raw.digest, size_bytes=4096, packed=packed)],
    )
    store.documents["layer", digest] = encode(stored)
    return stored


def declare(store: FakeStore, *layers: str, ago_s: float = 0.0) -> None:
    use = Use(node="n1", at=CLOCK.now() - ago_s, layers=list(layers))
    store.documents["use", "n1-x"] = encode(use)


class World:
    """A store with a layer that has a name, one that is declared, and one nobody needs."""

    def __init__(self) -> None:
        self.store = FakeStore(CLOCK)
        self.layers = {digest: add_layer(self.store, digest) for digest in (NAMED, USED, IDLE)}
        image = ImageRecord(
            name="base:latest",
            digest=NAMED,
            layers=[NAMED],
            size_bytes=1,
            created_at=1.0,
            source="test",
        )
        self.store.documents["image", "base:latest"] = encode(image)
        declare(self.store, USED)
        self.calls = 0

    async def collect(self, *, dry_run: bool = False) -> CollectReport:
        return await collect(self.store, CLOCK, dry_run=dry_run)

    def whole(self, digest: str) -> bool:
        """Whether a layer can be found, and all its blobs are there."""
        known = ("layer", digest) in self.store.documents
        return known and all(r.digest in self.store.blobs for r in refs_of(self.layers[digest]))

    def gone(self, digest: str) -> bool:
        known = ("layer", digest) in self.store.documents
        return not known and not any(
            r.digest in self.store.blobs for r in refs_of(self.layers[digest])
        )


async def test_what_nobody_needs_goes() -> None:
    world = World()
    rubbish = world.store.add(b"of an upload that ended", OLD)
    dry = await world.collect(dry_run=True)
    assert world.whole(IDLE)
    report = await world.collect()
    assert (report.blobs, report.kept_blobs, report.detail) == (5, 8, "1 layers")
    assert (dry.blobs, dry.bytes, dry.detail) == (report.blobs, report.bytes, report.detail)
    assert (world.whole(NAMED), world.whole(USED), world.gone(IDLE)) == (True, True, True)
    assert rubbish.digest not in world.store.blobs
    again = await world.collect()
    assert (again.blobs, again.kept_blobs, again.detail) == (0, 8, "0 layers")


async def test_every_kind_of_root_counts() -> None:
    world = World()
    version = NamedLayer(
        kind="workspace", name="w:v1", digest=IDLE, size_bytes=1, created_at=1.0, source="test"
    )
    world.store.documents["workspace", "w:v1"] = encode(version)
    await world.collect()
    assert world.whole(IDLE)
    del world.store.documents["workspace", "w:v1"]
    world.store.documents["toolkit", "w:v1"] = encode(version)
    await world.collect()
    assert world.whole(IDLE)
    del world.store.documents["toolkit", "w:v1"]
    await world.collect()
    assert world.gone(IDLE)


async def test_a_declaration_counts_for_a_week() -> None:
    world = World()
    declare(world.store, USED, ago_s=USE_LASTS_S - 60)
    await world.collect()
    assert world.whole(USED)
    declare(world.store, USED, ago_s=USE_LASTS_S + 1)
    await world.collect()
    assert world.gone(USED)


async def test_fresh_blobs_stay() -> None:
    world = World()
    fresh = world.store.add(b"fresh", FRESH_BLOB_S - 60)
    await world.collect()
    assert fresh.digest in world.store.blobs


async def count_calls() -> int:
    world = World()
    await world.collect()
    return world.store.calls.total()


async def test_a_node_that_declares_at_any_moment_has_what_it_then_finds() -> None:
    calls = await count_calls()
    found = missed = 0
    for declares in range(calls):
        tried = [await one_interleaving(declares, r) for r in range(declares, calls, 4)]
        found += sum(tried)
        missed += len(tried) - sum(tried)
    assert min(found, missed) > 0  # both happen


async def one_interleaving(declares: int, reads: int) -> bool:
    """A node declares before one call of the collector and looks for the layer before another."""
    world, found = World(), []

    async def meanwhile(_call: str, _about: str) -> None:
        if world.calls == declares:
            declare(world.store, USED, IDLE)
        if world.calls == reads:
            found.append(("layer", IDLE) in world.store.documents)
        world.calls += 1

    world.store.before = meanwhile
    await world.collect()
    if found == [True]:
        assert world.whole(IDLE), (declares, reads)
        await world.collect()
        assert world.whole(IDLE), (declares, reads)
    assert world.whole(USED)
    return found == [True]


async def test_a_collection_that_fails_anywhere_has_done_no_harm() -> None:
    for failing in range(await count_calls()):
        world = World()

        async def fail(_call: str, _about: str, world: World = world, at: int = failing) -> None:
            world.calls += 1
            if world.calls > at:
                raise Unavailable("gone")

        world.store.before = fail
        with contextlib.suppress(Unavailable):
            await world.collect()
        world.store.heal()
        for name in world.store.names("intent"):
            del world.store.documents["intent", name]
        assert world.whole(NAMED), failing
        assert world.whole(USED), failing
        await world.collect()
        assert world.gone(IDLE), failing


async def test_documents_that_vanish_meanwhile_are_no_failure() -> None:
    world = World()

    async def vanish(call: str, about: str) -> None:
        if call == "get_document":
            kind, _, name = about.partition(" ")
            world.store.documents.pop((kind, name), None)  # type: ignore[arg-type]

    world.store.before = vanish
    await world.collect(dry_run=True)
    world.store.heal()
    assert (await world.collect()).kept_blobs == 0


@pytest.mark.parametrize("body", [b"{", b"{}"])
async def test_a_damaged_layer_keeps_all_blobs(body: bytes) -> None:
    world = World()
    world.store.documents["layer", USED] = body
    before = dict(world.store.blobs)
    report = await world.collect()
    assert world.store.blobs == before
    assert f"layer {USED}" in report.detail
    assert (report.blobs, report.kept_blobs) == (0, len(before))
    assert world.store.documents["layer", USED] == body
    with pytest.raises(NotFound):
        await world.store.get_document("layer", IDLE)


@pytest.mark.parametrize("kind", ["image", "workspace", "toolkit", "use"])
async def test_a_damaged_root_keeps_everything(kind: Any) -> None:
    world = World()
    world.store.documents[kind, "odd"] = b"{"
    blobs, names = dict(world.store.blobs), world.store.names("layer")
    report = await world.collect()
    assert (world.store.blobs, world.store.names("layer")) == (blobs, names)
    assert f"{kind} odd" in report.detail


async def test_a_registry_keeps_its_blobs_itself() -> None:
    world = World()
    world.store.lists = False
    report = await world.collect()
    assert (report.blobs, report.detail) == (0, "1 layers; it lists no blobs")
    assert world.store.names("layer") == sorted([NAMED, USED])


async def test_trajectories_are_kept_for_a_month() -> None:
    store = FakeStore()
    for name, age_s in (("young", TRAJECTORY_LASTS_S - 60), ("old", TRAJECTORY_LASTS_S + 60)):
        blob = store.add(name.encode(), OLD)
        record = KeptTrajectory(sandbox=name, blob=blob, kept_at=CLOCK.now() - age_s)
        store.documents["trajectory", name] = encode(record)
    assert (await collect(store, CLOCK, dry_run=True)).blobs == 1
    assert ("trajectory", "old") in store.documents
    report = await collect(store, CLOCK, dry_run=False)
    assert (report.blobs, report.kept_blobs) == (1, 1)
    assert ("trajectory", "young") in store.documents
    assert ("trajectory", "old") not in store.documents
