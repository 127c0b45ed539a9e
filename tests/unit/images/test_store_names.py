"""Names as the store has them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import trio.testing
from msgspec.structs import replace

from dsec.base.errors import DataUnavailable, NotFound, Unavailable
from dsec.images.records import ImageRecord, NamedLayer, encode
from dsec.images.remembered import FRESH_S
from dsec.images.store_names import LISTING_S, StoreNames
from tests.unit.images.fake_store import AnyClock, FakeStore, digest_of

pytestmark = pytest.mark.anyio
ONE, TWO = digest_of(b"1"), digest_of(b"2")


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def image(name: str, layer: str = ONE) -> ImageRecord:
    return ImageRecord(
        name=name, digest=layer, layers=[layer], size_bytes=1, created_at=1.0, source="test"
    )


def named(name: str, digest: str = ONE, at: float = 1.0) -> NamedLayer:
    return NamedLayer(
        kind="toolkit", name=name, digest=digest, size_bytes=1, created_at=at, source="test"
    )


def put(store: FakeStore, record: ImageRecord | NamedLayer, name: str = "") -> None:
    kind = "image" if isinstance(record, ImageRecord) else record.kind
    store.documents[kind, name or record.name] = encode(record)


async def fresh() -> tuple[FakeStore, StoreNames]:
    store = FakeStore()
    put(store, image("base:latest"))
    return store, StoreNames(store, AnyClock())


async def test_many_who_ask_at_once_ask_once() -> None:
    store, names = await fresh()
    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(names.image, "base:latest")
    await names.image("base:latest")
    assert store.calls["get_document"] == 1


async def test_a_name_that_moves_is_seen_soon_and_one_that_goes_is_gone() -> None:
    store, names = await fresh()
    assert (await names.image("base:latest")).digest == ONE
    put(store, image("base:latest", TWO))
    assert (await names.image("base:latest")).digest == ONE
    await anyio.sleep(FRESH_S)
    assert (await names.image("base:latest")).digest == TWO
    del store.documents["image", "base:latest"]
    await anyio.sleep(FRESH_S)
    with pytest.raises(NotFound) as caught:
        await names.image("base:latest")
    assert caught.value.details["kind"] == "image"
    put(store, image("base:latest"))
    assert (await names.image("base:latest")).digest == ONE  # that it is not there is not kept


@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_what_was_known_is_used_while_the_store_is_away(how: str) -> None:
    store, names = await fresh()
    await names.image("base:latest")
    (store.fail if how == "fail" else store.hang)()
    await anyio.sleep(FRESH_S)
    began, asked = anyio.current_time(), store.calls["get_document"]
    for _ in range(3):
        assert (await names.image("base:latest")).digest == ONE
    assert anyio.current_time() - began <= LISTING_S
    assert store.calls["get_document"] == asked + 1
    store.fail()
    with pytest.raises(Unavailable):
        await names.image("other:latest")
    store.heal()
    put(store, image("other:latest"))
    assert await names.image("other:latest") == image("other:latest")


async def test_those_who_wait_share_a_failure() -> None:
    store, names = await fresh()
    failures = []

    async def slow(_call: str, _about: str) -> None:
        await anyio.sleep(30)
        raise Unavailable("gone")

    async def ask() -> None:
        with pytest.raises(Unavailable):
            await names.image("base:latest")
        failures.append(anyio.current_time())

    store.before = slow
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(ask)
    assert [at - began for at in failures] == pytest.approx([30] * 10)
    assert store.calls["get_document"] == 1


async def test_another_asks_when_who_asked_is_cancelled() -> None:
    store, names = await fresh()

    async def slow(_call: str, _about: str) -> None:
        await anyio.sleep(5)

    store.before = slow
    found = []

    async def ask() -> None:
        found.append(await names.image("base:latest"))

    async with anyio.create_task_group() as group:
        with anyio.move_on_after(1):
            group.start_soon(anyio.sleep, 0)
            async with anyio.create_task_group() as inner:
                inner.start_soon(names.image, "base:latest")
                await anyio.sleep(0.5)
                group.start_soon(ask)
                await anyio.sleep_forever()
    assert [record.name for record in found] == ["base:latest"]


@pytest.mark.parametrize(
    "record",
    [
        image("mine:latest"),
        replace(image("harmless"), name="mine:latest"),
        replace(image("x"), layers=["../../etc"]),
        replace(image("x"), mounts=["sha256:short"]),
        replace(image("x"), layers=[]),
        named("x:v1"),
    ],
)
async def test_a_document_that_is_about_something_else(record: ImageRecord | NamedLayer) -> None:
    store, names = await fresh()
    for name in ("harmless:latest", "x:latest"):
        store.documents["image", name] = encode(record)
        with pytest.raises(DataUnavailable):
            await names.image(name)
    assert [found.name for found in await names.all("image")] == ["base:latest"]


@pytest.mark.parametrize(
    "record",
    [
        named("lint:v2"),
        replace(named("lint:v1"), kind="workspace"),
        replace(named("lint:v1"), digest="sha256:x"),
        image("lint:v1"),
    ],
)
async def test_a_version_that_is_about_something_else(record: ImageRecord | NamedLayer) -> None:
    store, names = await fresh()
    store.documents["toolkit", "lint:v1"] = encode(record)
    with pytest.raises(DataUnavailable):
        await names.named("toolkit", "lint:v1")


async def test_a_list_is_not_spoilt_by_one_document() -> None:
    store, names = await fresh()
    put(store, named("lint:v1"))
    put(store, named("lint:v2", TWO))
    store.documents["toolkit", "odd"] = b"{"

    async def vanish(_call: str, about: str) -> None:
        if about == "toolkit lint:v1":
            store.documents.pop(("toolkit", "lint:v1"), None)

    store.before = vanish
    assert [found.name for found in await names.all("toolkit")] == ["lint:v2"]
    assert names.digests() == {TWO}


async def test_a_list_does_not_wait_for_the_store() -> None:
    store, names = await fresh()
    put(store, image("other:latest"))
    assert len(await names.all("image")) == 2
    await anyio.sleep(FRESH_S)
    store.hang()
    began = anyio.current_time()
    assert len(await names.all("image")) == 2
    assert await names.all("toolkit") == []
    assert anyio.current_time() - began <= 2 * LISTING_S
    store.fail()
    assert await names.all("workspace") == []
    store.heal()
    del store.documents["image", "base:latest"]
    await anyio.sleep(FRESH_S)
    assert [found.name for found in await names.all("image")] == ["other:latest"]


async def test_documents_of_a_list_are_read_together() -> None:
    store, names = await fresh()
    for number in range(100):
        put(store, image(f"i{number}:latest"))

    async def slow(_call: str, _about: str) -> None:
        await anyio.sleep(0.1)

    store.before = slow
    assert len(await names.all("image")) == 101


async def test_versions_of_a_path() -> None:
    store, names = await fresh()
    for version in ("a/lint:v1", "lint:v1", "lint:v2"):
        put(store, named(version))
    assert [v.name for v in await names.versions("toolkit", "lint")] == ["lint:v1", "lint:v2"]
    put(store, named("lint:v3"))
    names.changed("toolkit", "lint:v3")
    assert len(await names.versions("toolkit", "lint")) == 3
    empty = StoreNames(store, AnyClock())
    store.fail()
    with pytest.raises(Unavailable):
        await empty.versions("toolkit", "lint")
