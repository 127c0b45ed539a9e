"""Trajectories of ended sandboxes in the shared store."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import msgspec
import pytest
from typing_extensions import override

from dsec.base.clock import SystemClock
from dsec.base.errors import DataUnavailable, NotFound, RateLimited, StorageFull, Unavailable
from dsec.edge import shipping
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.retelling import READERS, READERS_OF_ONE_PROJECT, Part, Retelling
from dsec.edge.shipping import Shipping, forget, unsent
from dsec.images.records import KeptTrajectory
from dsec.images.store.directory import DirectoryStore
from dsec.images.store.interface import BlobStore
from dsec.trajectory import writer
from dsec.trajectory.format import Begun, Ended
from dsec.trajectory.reader import NONE, Going
from dsec.wire.sandbox import Recorded

BOX = "sbxn0de234567"
OTHER = "sbxn0de765432"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "TOGETHER_S", 0.0)


def place_in(tmp_path: Path, node: str) -> Path:
    """Where a node keeps trajectories of sandboxes that are over."""
    journal = Journal(tmp_path / node)
    journal.prepare()
    return journal.trajectories


def made(place: Path, name: str = BOX) -> Path:
    writer.create(place / name, [Begun(1, 1.0, "create"), Ended(1, 2.0, "ok")])
    return place


def store_in(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "store").mkdir(exist_ok=True)
    return DirectoryStore(tmp_path / "store")


def ships(store: BlobStore, place: Path, project: str | None = "p") -> Shipping:
    return Shipping(store, place, lambda _: project, SystemClock())


@asynccontextmanager
async def sending(ship: Shipping) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(ship.run)
        yield
        group.cancel_scope.cancel()


async def until_sent(kept: Path) -> None:
    with anyio.fail_after(20):
        while unsent(kept):  # noqa: ASYNC110 - nobody is told of a file
            await anyio.sleep(0.005)


async def nothing_goes_on() -> Going:
    return NONE


async def told(
    place: Path, ship: Shipping | None, name: str = BOX, project: str = ""
) -> list[Recorded]:
    tale = Retelling(Journal(place.parent), ship).tell(name, Part(), nothing_goes_on, project)
    return [entry async for entry in tale]


async def test_what_one_node_sent_another_tells(tmp_path: Path) -> None:
    here, there = made(place_in(tmp_path, "here")), place_in(tmp_path, "there")
    store = store_in(tmp_path)
    async with sending(ships(store, here)):
        await until_sent(here)
    other = ships(store, there)
    assert await told(there, other) == await told(here, None)
    assert [entry.op for entry in await told(there, other)] == ["create"]
    assert list(there.iterdir()) == []
    forget(here, BOX)
    assert list(here.iterdir()) == []


async def test_one_that_ends_later_is_sent_when_it_ends(tmp_path: Path) -> None:
    here = place_in(tmp_path, "here")
    ship = ships(store_in(tmp_path), here)
    async with sending(ship):
        await anyio.wait_all_tasks_blocked()
        made(here)
        ship.wake()
        await until_sent(here)


class Away(DirectoryStore):
    """A store that does not answer at first."""

    refusals = 1

    @override
    async def put_blob(self, *args: object, **more: object) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("away")
        await super().put_blob(*args, **more)  # type: ignore[arg-type]


async def test_what_could_not_be_sent_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "RETRY_S", 0.0)
    here = made(place_in(tmp_path, "here"))
    (tmp_path / "store").mkdir()
    store = Away(tmp_path / "store")
    async with sending(ships(store, here)):
        await until_sent(here)
    assert store.refusals == 0
    assert sorted(path.name for path in here.iterdir()) == [BOX, f"{BOX}.sent"]


class Odd(DirectoryStore):
    """A store with a bug, at first."""

    failures: int = 1

    @override
    async def put_document(self, *args: object, **more: object) -> None:
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError
        await super().put_document(*args, **more)  # type: ignore[arg-type]


async def test_nothing_that_goes_wrong_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "RETRY_S", 0.0)
    here = made(place_in(tmp_path, "here"))
    (tmp_path / "store").mkdir()
    store = Odd(tmp_path / "store")
    looks = iter([OSError("no such disk")])

    def odd(kept: Path) -> list[Path]:
        if problem := next(looks, None):
            raise problem
        return unsent(kept)

    monkeypatch.setattr(shipping, "unsent", odd)
    async with sending(ships(store, here)):
        await until_sent(here)
    assert store.failures == 0


async def test_nobody_has_it(tmp_path: Path) -> None:
    here = place_in(tmp_path, "here")
    for ship in (None, ships(store_in(tmp_path), here)):
        with pytest.raises(NotFound, match="nothing is known"):
            await told(here, ship)


async def test_what_was_changed_in_the_store_is_not_told(tmp_path: Path) -> None:
    here = made(place_in(tmp_path, "here"))
    store = store_in(tmp_path)
    async with sending(ships(store, here)):
        await until_sent(here)
    (blob,) = [b async for b in store.list_blobs()]
    path = store.blob_path(blob.digest)
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"x" * blob.size_bytes)
    (here / BOX).unlink()
    with pytest.raises(DataUnavailable):
        await told(here, ships(store, here))


# -- who may read it -------------------------------------------------------------------------------


async def sent_by(store: DirectoryStore, place: Path, project: str, name: str = BOX) -> None:
    made(place, name)
    async with sending(ships(store, place, project)):
        await until_sent(place)


async def document(store: DirectoryStore, name: str = BOX) -> KeptTrajectory:
    body = await store.get_document("trajectory", name)
    return msgspec.json.decode(body, type=KeptTrajectory)


async def forge(store: DirectoryStore, like: KeptTrajectory, **changes: object) -> None:
    forged = msgspec.structs.replace(like, **changes)
    body = msgspec.json.encode(forged)
    await store.put_document("trajectory", forged.sandbox, body, [forged.blob])


async def test_the_store_says_whose_it_is(tmp_path: Path) -> None:
    here, store = place_in(tmp_path, "here"), store_in(tmp_path)
    await sent_by(store, here, "victim")
    there = place_in(tmp_path, "there")
    assert (
        await Retelling(Journal(there.parent), ships(store, there)).sent(BOX)
    ).project == "victim"
    assert await told(there, ships(store, there), project="victim") == await told(here, None)
    with pytest.raises(DataUnavailable, match="another project"):
        await told(there, ships(store, there), project="thief")


async def test_a_forged_project_opens_nothing(tmp_path: Path) -> None:
    here, there, store = place_in(tmp_path, "here"), place_in(tmp_path, "there"), store_in(tmp_path)
    await sent_by(store, here, "victim")
    await forge(store, await document(store), project="thief")
    for project in ("thief", "victim", ""):
        with pytest.raises(DataUnavailable):
            await told(there, ships(store, there), project=project)
    assert list(there.iterdir()) == []


async def test_anothers_blob_under_ones_own_id_opens_nothing(tmp_path: Path) -> None:
    here, there, store = place_in(tmp_path, "here"), place_in(tmp_path, "there"), store_in(tmp_path)
    await sent_by(store, here, "victim")
    await forge(store, await document(store), sandbox=OTHER, project="thief")
    with pytest.raises(DataUnavailable, match="not its record"):
        await told(there, ships(store, there), OTHER, "thief")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"\xff", b'{"sandbox": "%s"}' % BOX.encode()],
)
async def test_a_broken_document_is_said_to_be_broken(tmp_path: Path, body: bytes) -> None:
    there, store = place_in(tmp_path, "there"), store_in(tmp_path)
    await store.put_document("trajectory", BOX, body, [])
    with pytest.raises(DataUnavailable):
        await ships(store, there).look(BOX)


@pytest.mark.parametrize("change", [{"sandbox": OTHER}, {"project": ""}])
async def test_a_document_that_does_not_say_whose(
    tmp_path: Path, change: dict[str, object]
) -> None:
    here, store = place_in(tmp_path, "here"), store_in(tmp_path)
    await sent_by(store, here, "p")
    body = msgspec.json.encode(msgspec.structs.replace(await document(store), **change))
    await store.put_document("trajectory", BOX, body, [])
    with pytest.raises(DataUnavailable, match="whose"):
        await told(place_in(tmp_path, "there"), ships(store, here))


@pytest.mark.parametrize("less", [1, -1, 10**6, -(shipping.MAX_BYTES)])
async def test_a_size_that_is_not_so_is_not_believed(tmp_path: Path, less: int) -> None:
    here, there, store = place_in(tmp_path, "here"), place_in(tmp_path, "there"), store_in(tmp_path)
    await sent_by(store, here, "p")
    size = (await document(store)).size_bytes
    await forge(store, await document(store), size_bytes=size - less)
    with pytest.raises(DataUnavailable):
        await told(there, ships(store, there))
    assert list(there.iterdir()) == []


async def test_one_whose_project_is_not_known_yet_waits(tmp_path: Path) -> None:
    here, store = made(place_in(tmp_path, "here")), store_in(tmp_path)
    known: list[str] = []
    asked = anyio.Event()

    def project_of(_sandbox: str) -> str | None:
        asked.set()
        return known[0] if known else None

    ship = Shipping(store, here, project_of, SystemClock())
    async with sending(ship):
        await asked.wait()
        assert unsent(here)
        known.append("p")
        ship.wake()
        await until_sent(here)


# -- bounds ----------------------------------------------------------------------------------------


async def test_only_so_many_lie_here_at_once(tmp_path: Path) -> None:
    here, there, store = place_in(tmp_path, "here"), place_in(tmp_path, "there"), store_in(tmp_path)
    await sent_by(store, here, "p")
    ship = ships(store, there)
    async with AsyncExitStack() as stack:
        for _ in range(shipping.FETCHED_BY_ONE_PROJECT):
            await stack.enter_async_context(ship.fetched(BOX))
        assert len(list(there.iterdir())) == shipping.FETCHED_BY_ONE_PROJECT
        with pytest.raises(RateLimited, match="this project"):
            await told(there, ship)
    assert list(there.iterdir()) == []
    assert await told(there, ship)


async def test_without_room_it_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, store = place_in(tmp_path, "here"), place_in(tmp_path, "there"), store_in(tmp_path)
    await sent_by(store, here, "p")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(StorageFull):
        await told(there, ships(store, there))


async def test_files_are_removed_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, store = place_in(tmp_path, "here"), place_in(tmp_path, "there"), store_in(tmp_path)
    threads: list[int] = []
    unlink = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(".") and path.parent in (here, there):
            threads.append(threading.get_ident())
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    await sent_by(store, here, "p")
    await told(there, ships(store, there))
    assert threads
    assert threading.get_ident() not in threads


async def test_a_reader_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    here, there, store = place_in(tmp_path, "here"), place_in(tmp_path, "there"), store_in(tmp_path)
    await sent_by(store, here, "p")
    retelling = Retelling(Journal(there.parent), ships(store, there))
    with anyio.CancelScope() as scope:
        async with aclosing(retelling.tell(BOX, Part(), nothing_goes_on)) as tale:
            await anext(tale)
            assert len(list(there.iterdir())) == 1
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert list(there.iterdir()) == []


async def test_readers_are_so_many(tmp_path: Path) -> None:
    here = made(place_in(tmp_path, "here"))
    retelling = Retelling(Journal(here.parent), None)
    async with AsyncExitStack() as stack:

        async def begin(project: str) -> None:
            tale = retelling.tell(BOX, Part(), nothing_goes_on, project)
            await anext(await stack.enter_async_context(aclosing(tale)))

        for _ in range(READERS_OF_ONE_PROJECT):
            await begin("greedy")
        with pytest.raises(RateLimited, match="this project"):
            await begin("greedy")
        for number in range(READERS - READERS_OF_ONE_PROJECT):
            await begin(f"modest-{number}")
        with pytest.raises(RateLimited, match="for 64 others"):
            await begin("late")
    assert [e async for e in retelling.tell(BOX, Part(), nothing_goes_on, "greedy")]
