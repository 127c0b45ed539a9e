"""What the control plane expects of a store of leases, held against SQLite and its twin in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from sqlalchemy.dialects import postgresql

from dsec.base.ids import PrincipalId, ProjectId
from dsec.control.leases import LeaseBook
from dsec.iam.projects import ROOT
from dsec.store import leases as sql
from dsec.store.database import open_sqlite
from dsec.store.leases import SqlLeases
from dsec.store.memory import MemoryLeases
from dsec.store.records import Lease, Terms
from dsec.wire.public_v1 import LeasePolicy

pytestmark = pytest.mark.anyio
TEAM = ProjectId("team")
ADA, BOB = PrincipalId("ada"), PrincipalId("bob")


@pytest.fixture(params=["memory", "sqlite"])
async def book(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LeaseBook]:
    if request.param == "memory":
        yield MemoryLeases()
        return
    async with open_sqlite(tmp_path / "control.db") as database:
        yield SqlLeases(database)


def terms(
    at: float = 1000.0,
    ttl_s: float = 60.0,
    *,
    holder: PrincipalId = ADA,
    on_lapse: LeasePolicy = "pause",
    key: str = "",
) -> Terms:
    return Terms(
        holder=holder,
        ttl_s=ttl_s,
        expires_at=at + ttl_s,
        on_lapse=on_lapse,
        on_superseded="reap",
        at=at,
        key=key,
    )


async def lapsed(book: LeaseBook, lease: Lease) -> Lease:
    wanted = replace(lease, lapsed_at=2000.0, lapsing=True, due_at=2000.0)
    written = await book.replace(lease, wanted)
    assert written is not None
    return written


async def test_each_taking_is_a_new_epoch(book: LeaseBook) -> None:
    assert await book.find(ROOT, "run") is None
    first = await book.take(ROOT, "run", terms())
    assert (first.epoch, first.holder, first.expires_at) == (1, ADA, 1060.0)
    assert (first.superseding, first.due_at) == (False, 1060.0)
    second = await book.take(ROOT, "run", terms(1010.0, 30.0, holder=BOB))
    assert (second.epoch, second.holder, second.expires_at) == (2, BOB, 1040.0)
    assert (second.created_at, second.taken_at) == (1000.0, 1010.0)
    assert (second.superseding, second.due_at) == (True, 1010.0)
    assert await book.find(ROOT, "run") == second


async def test_taken_again_under_its_key_it_is_the_same(book: LeaseBook) -> None:
    first = await book.take(ROOT, "run", terms(key="a"))
    assert await book.take(ROOT, "run", terms(1010.0, key="a")) == first
    await book.renew(ROOT, "run", 1, terms(1020.0, key="c"))
    assert (await book.take(ROOT, "run", terms(1030.0, key="a"))).epoch == 1
    assert (await book.take(ROOT, "run", terms(1040.0, key="b"))).epoch == 2
    assert (await book.take(ROOT, "run", terms(1050.0))).epoch == 3
    assert (await book.take(ROOT, "run", terms(1060.0))).epoch == 4


async def test_of_many_takings_at_once_no_two_are_one_epoch(book: LeaseBook) -> None:
    epochs: list[int] = []

    async def take() -> None:
        epochs.append((await book.take(ROOT, "run", terms())).epoch)

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(take)
    assert sorted(epochs) == list(range(1, 21))


async def test_jobs_of_two_projects_do_not_meet(book: LeaseBook) -> None:
    mine = await book.take(ROOT, "run", terms())
    theirs = await book.take(TEAM, "run", terms(holder=BOB))
    assert (mine.epoch, theirs.epoch) == (1, 1)
    assert await book.renew(TEAM, "run", 2, terms()) is None
    await book.take(ROOT, "a", terms())
    assert [lease.job for lease in await book.of_project(ROOT)] == ["a", "run"]
    assert await book.of_project(TEAM) == [theirs]


async def test_only_the_epoch_in_force_is_renewed(book: LeaseBook) -> None:
    await book.take(ROOT, "run", terms())
    renewed = await book.renew(ROOT, "run", 1, terms(1050.0, 90.0))
    assert renewed is not None
    assert (renewed.expires_at, renewed.due_at, renewed.ttl_s) == (1140.0, 1140.0, 90.0)
    assert (renewed.taken_at, renewed.updated_at) == (1000.0, 1050.0)
    assert await book.renew(ROOT, "run", 2, terms()) is None
    assert await book.renew(ROOT, "run", 1 << 80, terms()) is None
    assert not await book.release(ROOT, "run", 1 << 80, 1000.0)
    await book.take(ROOT, "run", terms())
    assert await book.renew(ROOT, "run", 1, terms()) is None
    assert await book.renew(ROOT, "other", 1, terms()) is None


async def test_a_renewal_does_not_put_off_what_is_owed(book: LeaseBook) -> None:
    await book.take(ROOT, "run", terms())
    taken = await book.take(ROOT, "run", terms(1010.0))
    renewed = await book.renew(ROOT, "run", 2, terms(1020.0))
    assert renewed is not None
    assert renewed.superseding
    assert renewed.due_at == taken.due_at


async def test_one_that_has_lapsed_is_asleep_or_lost(book: LeaseBook) -> None:
    await lapsed(book, await book.take(ROOT, "asleep", terms()))
    await lapsed(book, await book.take(ROOT, "lost", terms(on_lapse="reap")))
    again = await book.renew(ROOT, "asleep", 1, terms(2010.0))
    assert again is not None
    assert (again.lapsed_at, again.lapsing, again.due_at) == (None, False, 2070.0)
    # What it would be now does not count: its sandboxes are being stopped.
    assert await book.renew(ROOT, "lost", 1, terms(2010.0)) is None
    assert not await book.release(ROOT, "lost", 1, 2010.0)


async def test_what_is_given_back_keeps_its_epoch(book: LeaseBook) -> None:
    await book.take(ROOT, "run", terms())
    assert not await book.release(ROOT, "run", 2, 1010.0)
    assert await book.release(ROOT, "run", 1, 1010.0)
    assert not await book.release(ROOT, "run", 1, 1010.0)
    lease = await book.find(ROOT, "run")
    assert lease is not None
    assert (lease.expires_at, lease.due_at, lease.epoch) == (None, None, 1)
    assert await book.renew(ROOT, "run", 1, terms()) is None
    assert (await book.take(ROOT, "run", terms())).epoch == 2


async def test_what_is_due_comes_in_order(book: LeaseBook) -> None:
    await book.take(ROOT, "late", terms(ttl_s=90.0))
    await book.take(TEAM, "soon", terms(ttl_s=30.0))
    assert await book.due(1029.0) == []
    assert await book.nearest(1029.0) == 1030.0
    assert await book.nearest(1030.0) == 1090.0
    assert await book.nearest(1090.0) is None
    assert [lease.job for lease in await book.due(1090.0)] == ["soon", "late"]


async def test_what_has_changed_is_not_written_over(book: LeaseBook) -> None:
    seen = await book.take(ROOT, "run", terms())
    await book.renew(ROOT, "run", 1, terms())
    assert await book.replace(seen, replace(seen, lapsing=True)) is None
    now = await book.find(ROOT, "run")
    assert now is not None
    written = await book.replace(now, replace(now, lapsing=True, due_at=None))
    assert written is not None
    assert written.lapsing
    assert await book.find(ROOT, "run") == written
    assert await book.replace(now, now) is None


async def test_what_nobody_holds_is_forgotten(book: LeaseBook) -> None:
    await book.take(ROOT, "held", terms())
    await book.take(ROOT, "released", terms())
    await book.release(ROOT, "released", 1, 1000.0)
    await lapsed(book, await book.take(ROOT, "owing", terms()))
    over = await lapsed(book, await book.take(ROOT, "lapsed", terms()))
    await book.replace(over, replace(over, lapsing=False, due_at=None))
    assert await book.forget_before(1000.0) == 0
    assert await book.forget_before(1001.0) == 2
    assert [lease.job for lease in await book.of_project(ROOT)] == ["held", "owing"]


async def test_leases_are_there_after_a_restart(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "a.db") as database:
        lease = await lapsed(
            SqlLeases(database), await SqlLeases(database).take(ROOT, "run", terms())
        )
    async with open_sqlite(tmp_path / "a.db") as database:
        assert await SqlLeases(database).due(2000.0) == [lease]


def test_postgresql_has_words_for_all_of_it() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    statements = [sql._FIND, sql._OF_PROJECT, sql._DUE, sql._NEAREST, sql._RENEW, sql._RELEASE]
    for statement in [*statements, sql._REPLACE, sql._FORGET]:
        assert str(statement.compile(dialect=dialect))
    taking = str(sql._take("postgresql").compile(dialect=dialect))
    assert "ON CONFLICT (project, job) DO UPDATE SET" in taking
    assert "RETURNING leases.project" in taking
