"""Idempotency keys in SQL: implements `dsec.control.claims.Claims`."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, delete, select, update

from dsec.base.clock import Clock
from dsec.base.ids import ProjectId, SandboxId
from dsec.store.database import Database
from dsec.store.keys import insert_or_ignore
from dsec.store.records import Claim
from dsec.store.tables import creation_claims as table

# Made once: building a statement costs as much as running it.
_UNDER_KEY = (table.c.project == bindparam("of_project"), table.c.key == bindparam("of_key"))
_FIND = select(table.c.sandbox, table.c.digest, table.c.settled).where(*_UNDER_KEY)
_MOVE = (
    update(table)
    .where(*_UNDER_KEY, table.c.sandbox == bindparam("refused"), table.c.settled.is_(False))
    .values(sandbox=bindparam("to"))
)
_SETTLE = (
    update(table)
    .where(*_UNDER_KEY, table.c.sandbox == bindparam("of_sandbox"))
    .values(settled=True)
)


class SqlClaims:
    """Which sandbox an idempotency key stands for, in a database."""

    def __init__(self, database: Database, clock: Clock, *, shared: bool = False) -> None:
        self.shared = shared
        self._database = database
        self._clock = clock

    async def find(self, project: ProjectId, key: str) -> Claim | None:
        """The claim under a key."""
        return await self._database.read(lambda connection: _find(connection, project, key))

    async def claim(self, project: ProjectId, key: str, wanted: Claim) -> Claim:
        """Claim a key; the claim that holds is the answer, be it an earlier one."""
        row = {
            "project": project,
            "key": key,
            "sandbox": wanted.sandbox,
            "digest": wanted.digest,
            "settled": wanted.settled,
            "created_at": self._clock.now(),
        }

        def work(connection: Connection) -> Claim:
            if connection.execute(insert_or_ignore(connection, table), row).rowcount:
                return wanted
            return _find(connection, project, key) or wanted

        return await self._database.write(work)

    async def move(
        self, project: ProjectId, key: str, refused: SandboxId, to: SandboxId
    ) -> Claim | None:
        """Point a key that is not settled from a refused id to another; the claim that holds."""
        values = {"of_project": project, "of_key": key, "refused": refused, "to": to}

        def work(connection: Connection) -> Claim | None:
            connection.execute(_MOVE, values)
            return _find(connection, project, key)

        return await self._database.write(work)

    async def settle(self, project: ProjectId, key: str, sandbox: SandboxId) -> bool:
        """Fix a key to its sandbox for good; False if it was moved elsewhere meanwhile."""
        values = {"of_project": project, "of_key": key, "of_sandbox": sandbox}
        return await self._database.write(lambda c: c.execute(_SETTLE, values).rowcount == 1)

    async def forget_before(self, moment: float) -> int:
        """Drop claims older than a moment, in seconds since the epoch; how many."""
        old = delete(table).where(table.c.created_at < moment)
        return await self._database.write(lambda connection: connection.execute(old).rowcount)


def _find(connection: Connection, project: ProjectId, key: str) -> Claim | None:
    row = connection.execute(_FIND, {"of_project": project, "of_key": key}).first()
    return None if row is None else Claim(row.sandbox, row.digest, row.settled)
