"""The parts that more than one process is made of."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import DsecError, InvalidRequest
from dsec.base.ids import NodeId, node_id
from dsec.control.stores import Stores
from dsec.main.settings import Settings

CLOCK: Clock = SystemClock()
_LETTERS = "abcdefghjkmnpqrstvwxyz"


def version() -> str:
    """Of this program."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("dsec")
    except PackageNotFoundError:
        return "0.0.0"


@contextmanager
def lone_errors() -> Iterator[None]:
    """Raise an error of ours as itself, not in the group of the tasks it came through."""
    try:
        yield
    except BaseExceptionGroup as group:
        found = _leaves(group)
        if len(found) == 1 and isinstance(found[0], DsecError):
            raise found[0] from group
        raise


def _leaves(exc: BaseException) -> list[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for inner in exc.exceptions for leaf in _leaves(inner)]
    return [exc]


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Stores]:
    """The store of principals, keys, claims and leases."""
    from dsec.store.claims import SqlClaims
    from dsec.store.database import open_sqlite
    from dsec.store.keys import SqlDirectory
    from dsec.store.leases import SqlLeases

    async with open_sqlite(settings.state / "control.db") as database:
        directory, claims = SqlDirectory(database, CLOCK), SqlClaims(database, CLOCK)
        yield Stores(directory, claims, SqlLeases(database))


def read_secret(path: str) -> str:
    """A secret from a file; empty for no path.

    Raises:
        InvalidRequest: the file cannot be read, or others can read it.
    """
    if not path:
        return ""
    file = Path(path)
    try:
        if file.stat().st_mode & 0o077:
            raise InvalidRequest(f"{path} is readable by others; chmod 600 it")
        return file.read_text().strip()
    except OSError as exc:
        raise InvalidRequest(f"cannot read {path}: {exc.strerror}") from exc


def node_name(state: Path) -> NodeId:
    """This node's name: drawn once, kept in the state directory, part of every sandbox's id.

    Raises:
        InvalidRequest: the file holds something else.
    """
    file = state / "node"
    try:
        return node_id(file.read_text().strip())
    except FileNotFoundError:
        name = node_id("".join(secrets.choice(_LETTERS) for _ in range(4)))
        # Whole or not at all: half a name would keep every later server from starting.
        part = file.with_name("node.part")
        part.write_text(f"{name}\n")
        part.replace(file)
        return name
