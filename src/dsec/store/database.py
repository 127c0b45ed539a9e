"""Opens the database, brings its tables up to date, and runs work on it.

SQLAlchemy's asynchronous SQLite driver goes to its thread and back for every cursor, fetch and
commit; a whole piece of work in one trip is four times as fast (docs/adr/0041-sqlite-in-one-trip.md).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import anyio
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from dsec.base.errors import StorageFull
from dsec.kit.blocking import in_thread

T = TypeVar("T")

HEAD = "0002"
"""The newest migration; a database that has it is opened without loading Alembic."""

PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    # A power cut may lose the last claims, never the file; a lost claim is a lost idempotency key.
    "PRAGMA synchronous=NORMAL",
    "PRAGMA busy_timeout=5000",
    "PRAGMA foreign_keys=ON",
)


class Database:
    """A database that is open. Work is a function of a connection, and runs in a worker thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # SQLite lets one write at a time; here the others wait without holding a thread.
        self._writing = anyio.Lock()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run work that changes nothing."""
        return await in_thread("disk", self._read, work)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run work that changes something, in a transaction of its own."""
        async with self._writing:
            return await in_thread("disk", self._write, work)

    def _read(self, work: Callable[[Connection], T]) -> T:
        with _full_disk_named(), self._engine.connect() as connection:
            return work(connection)

    def _write(self, work: Callable[[Connection], T]) -> T:
        with _full_disk_named(), self._engine.begin() as connection:
            return work(connection)


@contextmanager
def _full_disk_named() -> Iterator[None]:
    """Raise StorageFull for what a full disk makes of a piece of work."""
    try:
        yield
    except OperationalError as exc:
        if getattr(exc.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise StorageFull("the disk of the state directory is full") from exc
        raise


@asynccontextmanager
async def open_sqlite(path: Path) -> AsyncIterator[Database]:
    """Open a SQLite file, migrate it, close it at the end. Raises StorageFull."""
    engine = create_engine(URL.create("sqlite", database=str(path)), pool_size=4, max_overflow=4)
    event.listen(engine, "connect", _set_up)
    event.listen(engine, "begin", _begin)
    try:
        await in_thread("disk", migrate, engine)
        yield Database(engine)
    finally:
        with anyio.CancelScope(shield=True):
            await in_thread("disk", engine.dispose)


def _set_up(connection: sqlite3.Connection, _record: ConnectionPoolEntry) -> None:
    # Left to itself, Python's driver begins no transaction before DDL: a migration that was
    # interrupted would stay half done.
    connection.isolation_level = None
    for pragma in PRAGMAS:
        connection.execute(pragma).close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def migrate(engine: Engine) -> None:
    """Bring the tables up to date, all or nothing. Raises StorageFull."""
    with _full_disk_named(), engine.begin() as connection:
        if version_of(connection) == HEAD:
            return
        logging.getLogger("alembic").setLevel(logging.WARNING)  # it talks while it is imported
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def version_of(connection: Connection) -> str:
    """The newest migration a database has seen; empty for a new one."""
    if not inspect(connection).has_table("alembic_version"):
        return ""
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar() or "")
