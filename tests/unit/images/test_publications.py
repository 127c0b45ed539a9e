"""Versions of workspaces and toolkits over several nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import trio.testing

from dsec.base.errors import Conflict, InvalidRequest, NotFound, Unavailable, Unsupported
from dsec.images.data import DataStore
from dsec.images.jobs import Job
from dsec.images.layers import LayerStore
from dsec.images.publications import Publications
from dsec.images.records import LayerRecord, encode
from dsec.images.sharing import Sharing
from dsec.images.store.interface import BlobRef
from dsec.images.store_names import LISTING_S
from dsec.wire.public_v1 import LayerView
from tests.unit.images.fake_store import AnyClock, FakeStore, SetClock, digest_of
from tests.unit.images.test_sharing import version

pytestmark = pytest.mark.anyio
T = TypeVar("T")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Importing:
    """Makes a layer without data of any file, as the importer would of a tar."""

    def __init__(self, root: Path, layers: LayerStore) -> None:
        self._root = root
        self._layers = layers

    async def publish(
        self,
        _job: Job[Any],
        upload: Path,
        source: str,
        kept: Callable[[LayerRecord], Awaitable[T]],
    ) -> T:
        content = await anyio.Path(upload).read_bytes()
        meta = self._root / f"tmp/meta-{upload.name}"
        await anyio.Path(meta).write_bytes(content)
        record = LayerRecord(
            digest=digest_of(content),
            source=source,
            created_at=1.0,
            meta=BlobRef(digest_of(content), len(content)),
        )
        return await kept(self._layers.put(record, meta))


class Node:
    """A node's publications."""

    def __init__(self, root: Path, store: FakeStore | None) -> None:
        self._root = root
        self.layers = LayerStore(root, root / "run")
        data = DataStore(root)
        self.layers.open()
        data.open()
        clock = store.clock if store else SetClock()
        sharing = (
            Sharing(store, root, self.layers, data, direct=False, clock=clock) if store else None
        )
        importing: Any = Importing(root, self.layers)
        self.named = Publications(root, self.layers, importing, sharing, clock)
        self.named.open()

    async def publish(self, name: str, content: bytes = b"one") -> LayerView:
        upload = self._root / f"tmp/{digest_of(content)}"
        await anyio.Path(upload).write_bytes(content)
        return await self.named.publish(Job(), "toolkit", name, "", upload)

    async def digest(self, name: str) -> str:
        return (await self.named.find("toolkit", name)).digest

    async def names(self) -> list[str]:
        return [view.name for view in await self.named.list("toolkit")]


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def store(clock: SetClock) -> FakeStore:
    return FakeStore(clock)


@pytest.fixture
def node(tmp_path: Path, store: FakeStore) -> Callable[[str], Node]:
    return lambda name: Node(tmp_path / name, store)


async def at_once(*works: Callable[[], Awaitable[LayerView]]) -> list[LayerView | Conflict]:
    """What each comes to."""
    found: list[LayerView | Conflict] = []

    async def one(work: Callable[[], Awaitable[LayerView]]) -> None:
        try:
            found.append(await work())
        except Conflict as error:
            found.append(error)

    async with anyio.create_task_group() as group:
        for work in works:
            group.start_soon(one, work)
    return found


async def test_of_two_nodes_one_has_the_version(node: Callable[[str], Node]) -> None:
    one, two = node("one"), node("two")
    found = await at_once(lambda: one.publish("t:v1", b"one"), lambda: two.publish("t:v1", b"two"))
    (won,) = [view for view in found if isinstance(view, LayerView)]
    for each in (one, two, node("three")):
        assert await each.digest("t:v1") == won.digest


async def test_the_same_content_is_the_same_version(
    node: Callable[[str], Node], store: FakeStore, clock: SetClock
) -> None:
    one, two = node("one"), node("two")
    first = await one.publish("t:v1")
    clock.time += 100
    assert await two.publish("t:v1") == first
    assert await one.publish("t:v1") == first
    assert store.names("toolkit") == ["t:v1"]


async def test_versions_that_are_counted_up_do_not_meet(
    node: Callable[[str], Node], store: FakeStore
) -> None:
    nodes = [node(f"n{number}") for number in range(3)]
    found = await at_once(
        *(
            lambda each=each, number=number: each.publish("t", b"content %d" % number)
            for number, each in enumerate(nodes)
        )
    )
    assert sorted(view.name for view in found if isinstance(view, LayerView)) == [
        "t:v1",
        "t:v2",
        "t:v3",
    ]
    assert store.names("toolkit") == ["t:v1", "t:v2", "t:v3"]


async def test_a_version_nobody_can_read_is_counted(
    node: Callable[[str], Node], store: FakeStore
) -> None:
    store.documents["toolkit", "t:v7"] = b"{"
    assert (await node("one").publish("t")).name == "t:v8"


async def test_a_node_without_a_store_keeps_its_versions_too(tmp_path: Path) -> None:
    alone = Node(tmp_path / "alone", None)
    found = await at_once(
        lambda: alone.publish("t:v1", b"one"), lambda: alone.publish("t:v1", b"two")
    )
    assert sorted(type(each).__name__ for each in found) == ["Conflict", "LayerView"]
    assert (await alone.publish("t", b"three")).name == "t:v2"
    assert await alone.names() == ["t:v1", "t:v2"]
    await alone.named.remove("toolkit", "t:v1")
    assert await alone.names() == ["t:v2"]


async def test_what_the_store_does_not_have_was_not_published(
    node: Callable[[str], Node], store: FakeStore
) -> None:
    one = node("one")
    store.fail()
    with pytest.raises(Unavailable):
        await one.publish("t:v1")
    assert await one.names() == []
    store.heal()
    await one.publish("t:v1")


async def test_nothing_of_the_store_replaces_what_was_published_here(
    node: Callable[[str], Node], store: FakeStore
) -> None:
    one = node("one")
    view = await one.publish("t:v1")
    store.documents["toolkit", "t:v1"] = encode(version("t:v1", digest=digest_of(b"evil")))
    store.documents["toolkit", "x:v1"] = encode(version("t:v1", digest=digest_of(b"evil")))
    assert await one.names() == ["t:v1"]
    assert await one.digest("t:v1") == await one.digest("t") == view.digest


async def test_names_of_the_store_are_not_copied(
    node: Callable[[str], Node], store: FakeStore, clock: SetClock
) -> None:
    one, two = node("one"), node("two")
    await one.publish("t:v1")
    assert await two.names() == ["t:v1"]
    assert await two.digest("t:v1") == digest_of(b"one")
    assert two.named.digests() == set()
    await one.named.remove("toolkit", "t:v1")
    clock.time += 60
    assert await two.names() == []
    with pytest.raises(NotFound):
        await two.digest("t:v1")
    assert store.names("toolkit") == []


async def test_the_newest_version(
    node: Callable[[str], Node], store: FakeStore, clock: SetClock
) -> None:
    one, two = node("one"), node("two")
    await one.publish("t:v1", b"one")
    clock.time += 60
    await two.publish("t:v2", b"two")
    assert await one.digest("t") == digest_of(b"two")
    store.fail()
    assert await one.digest("t") == digest_of(b"two")  # as it was known
    with pytest.raises(Unavailable):
        await node("three").digest("t")


@pytest.mark.parametrize("how", ["fail", "hang"])
@pytest.mark.parametrize(
    "anyio_backend", [("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)})]
)
async def test_what_is_known_here_serves_while_the_store_is_away(tmp_path: Path, how: str) -> None:
    store = FakeStore(AnyClock())
    one = Node(tmp_path / "one", store)
    one.named._shelves["toolkit"].put(version("t:v1"))
    (store.fail if how == "fail" else store.hang)()
    began = anyio.current_time()
    assert await one.digest("t") == version().digest
    assert await one.names() == ["t:v1"]
    assert anyio.current_time() - began <= 2 * LISTING_S


async def test_what_is_used_is_not_removed(node: Callable[[str], Node], store: FakeStore) -> None:
    one = node("one")
    view = await one.publish("t:v1")
    one.layers.pins.pin([view.digest], "s1")
    with pytest.raises(Conflict, match="used by s1"):
        await one.named.remove("toolkit", "t:v1")
    with pytest.raises(InvalidRequest, match="which version"):
        await one.named.remove("toolkit", "t")
    assert (await one.names(), store.names("toolkit")) == (["t:v1"], ["t:v1"])


async def test_a_version_goes_here_even_if_the_store_keeps_it(
    node: Callable[[str], Node], store: FakeStore
) -> None:
    one = node("one")
    await one.publish("t:v1")
    store.deletes = False
    with pytest.raises(Unsupported):
        await one.named.remove("toolkit", "t:v1")
    assert one.named.digests() == set()


async def test_removal_leaves_what_the_name_means_now(
    node: Callable[[str], Node], store: FakeStore
) -> None:
    one = node("one")
    await one.publish("t:v1")
    moved = encode(version("t:v1", digest=digest_of(b"new")))
    store.documents["toolkit", "t:v1"] = moved
    await one.named.remove("toolkit", "t:v1")
    assert store.documents["toolkit", "t:v1"] == moved
