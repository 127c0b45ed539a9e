"""Migrations make what the tables say, and all of it or nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

import dsec.store.database as database
from dsec.base.clock import SystemClock
from dsec.base.errors import StorageFull
from dsec.base.ids import ProjectId, SandboxId
from dsec.store.claims import SqlClaims
from dsec.store.database import HEAD, migrate, open_sqlite, version_of
from dsec.store.records import Claim
from dsec.store.tables import metadata

pytestmark = pytest.mark.anyio
MIGRATIONS = Path(database.__file__).with_name("migrations")


def test_head_is_the_newest_migration() -> None:
    assert ScriptDirectory(str(MIGRATIONS)).get_current_head() == HEAD


async def test_migrations_make_the_tables(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "a.db"):
        pass
    engine = create_engine(f"sqlite:///{tmp_path}/a.db")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert version_of(connection) == HEAD
    engine.dispose()


async def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a?mode=memory&b#c%20 é"
    folder.mkdir()
    async with open_sqlite(folder / "a.db"):
        assert (folder / "a.db").exists()


async def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "PRAGMA max_page_count=24"
    monkeypatch.setattr(database, "PRAGMAS", (*database.PRAGMAS, full))
    async with open_sqlite(tmp_path / "a.db") as opened:
        claims = SqlClaims(opened, SystemClock())
        claim = Claim(SandboxId("sbx"), b"d" * 32)

        async def fill() -> None:
            for number in range(1000):
                await claims.claim(ProjectId("root"), f"{number}" * 50, claim)

        with pytest.raises(StorageFull):
            await fill()
        assert await claims.find(ProjectId("root"), "0" * 50) == claim
    monkeypatch.setattr(database, "PRAGMAS", ("PRAGMA max_page_count=2",))
    with pytest.raises(StorageFull):
        async with open_sqlite(tmp_path / "b.db"):
            pass


async def test_an_interrupted_migration_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engine: object) -> None:
        from alembic import op

        with monkeypatch.context() as patch:
            patch.setattr(op, "create_index", lambda *_: 1 / 0)
            migrate(engine)  # type: ignore[arg-type]

    async def start() -> None:
        async with open_sqlite(tmp_path / "a.db"):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(database, "migrate", interrupted)
        with pytest.raises(ZeroDivisionError):
            await start()
    raw = sqlite3.connect(tmp_path / "a.db")
    assert raw.execute("SELECT name FROM sqlite_master").fetchall() == []
    raw.close()
    await start()


async def test_the_file_is_set_up_for_a_server(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "a.db") as opened:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 1), ("foreign_keys", 1)):
            found = await opened.read(
                lambda c, name=pragma: c.exec_driver_sql(f"PRAGMA {name}").scalar()  # type: ignore[misc]
            )
            assert found == value
