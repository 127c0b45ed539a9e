"""Trajectories of ended sandboxes in the shared store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from typing_extensions import override

from dsec.base.clock import SystemClock
from dsec.base.errors import DataUnavailable, NotFound, Unavailable
from dsec.edge import shipping
from dsec.edge.retelling import Part, retell
from dsec.edge.shipping import Shipping, forget, unsent
from dsec.images.store.directory import DirectoryStore
from dsec.trajectory import writer
from dsec.trajectory.format import Begun, Ended
from dsec.wire.sandbox import Recorded

BOX = "sbxn0de234567"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "TOGETHER_S", 0.0)


def made(place: Path, name: str = BOX) -> Path:
    place.mkdir(exist_ok=True)
    writer.create(place / name, [Begun(1, 1.0, "create"), Ended(1, 2.0, "ok")])
    return place


def store_in(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "store").mkdir(exist_ok=True)
    return DirectoryStore(tmp_path / "store")


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


async def told(place: Path, ship: Shipping | None) -> list[Recorded]:
    return [entry async for entry in retell(BOX, [place / BOX], ship, Part())]


async def test_what_one_node_sent_another_tells(tmp_path: Path) -> None:
    here, there = made(tmp_path / "here"), tmp_path / "there"
    there.mkdir()
    store = store_in(tmp_path)
    async with sending(Shipping(store, here, SystemClock())):
        await until_sent(here)
    other = Shipping(store, there, SystemClock())
    assert await told(there, other) == await told(here, None)
    assert [entry.op for entry in await told(there, other)] == ["create"]
    assert list(there.iterdir()) == []
    forget(here, BOX)
    assert list(here.iterdir()) == []


async def test_one_that_ends_later_is_sent_when_it_ends(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    ship = Shipping(store_in(tmp_path), here, SystemClock())
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
    here = made(tmp_path / "here")
    (tmp_path / "store").mkdir()
    store = Away(tmp_path / "store")
    async with sending(Shipping(store, here, SystemClock())):
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
    here = made(tmp_path / "here")
    (tmp_path / "store").mkdir()
    store = Odd(tmp_path / "store")
    looks = iter([OSError("no such disk")])

    def odd(kept: Path) -> list[Path]:
        if problem := next(looks, None):
            raise problem
        return unsent(kept)

    monkeypatch.setattr(shipping, "unsent", odd)
    async with sending(Shipping(store, here, SystemClock())):
        await until_sent(here)
    assert store.failures == 0


async def test_nobody_has_it(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for ship in (None, Shipping(store_in(tmp_path), here, SystemClock())):
        with pytest.raises(NotFound, match="nothing is known"):
            await told(here, ship)


async def test_what_was_changed_in_the_store_is_not_told(tmp_path: Path) -> None:
    here = made(tmp_path / "here")
    store = store_in(tmp_path)
    async with sending(Shipping(store, here, SystemClock())):
        await until_sent(here)
    (blob,) = [b async for b in store.list_blobs()]
    path = store.blob_path(blob.digest)
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"x" * blob.size_bytes)
    (here / BOX).unlink()
    with pytest.raises(DataUnavailable):
        await told(here, Shipping(store, here, SystemClock()))
