"""Leases of jobs in SQL: implements `dsec.control.leases.LeaseBook`."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    RowMapping,
    and_,
    bindparam,
    case,
    delete,
    false,
    func,
    literal_column,
    not_,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from dsec.base.ids import ProjectId
from dsec.store.database import Database
from dsec.store.records import Lease, Terms, first_lease
from dsec.store.tables import leases as table

MAX_EPOCH = (1 << 63) - 1
"""There is no number beyond it in SQL, and so no such epoch."""

# Made once: building a statement costs as much as running it.
_OF_JOB = (table.c.project == bindparam("of_project"), table.c.job == bindparam("of_job"))
_HELD = (
    *_OF_JOB,
    table.c.epoch == bindparam("of_epoch"),
    table.c.expires_at.is_not(None),
    # One that has lapsed is lost if its sandboxes are, and only asleep if they are.
    not_(and_(table.c.lapsed_at.is_not(None), table.c.on_lapse == "reap")),
)
_FIND = select(table).where(*_OF_JOB)
_OF_PROJECT = select(table).where(table.c.project == bindparam("of_project")).order_by(table.c.job)
_DUE = select(table).where(table.c.due_at <= bindparam("moment")).order_by(table.c.due_at)
_NEAREST = select(func.min(table.c.due_at)).where(table.c.due_at > bindparam("moment"))
_NO_LAPSE = {"lapsed_at": null(), "lapsing": false()}
_RENEW = (
    update(table)
    .where(*_HELD)
    .values(
        holder=bindparam("holder"),
        ttl_s=bindparam("ttl_s"),
        expires_at=bindparam("new_expiry"),
        on_lapse=bindparam("on_lapse"),
        on_superseded=bindparam("on_superseded"),
        updated_at=bindparam("at"),
        due_at=case((table.c.superseding, table.c.due_at), else_=bindparam("new_expiry")),
        version=table.c.version + 1,
        **_NO_LAPSE,
    )
    .returning(*table.c)
)
_RELEASE = (
    update(table)
    .where(*_HELD)
    .values(
        expires_at=null(),
        updated_at=bindparam("at"),
        due_at=case((table.c.superseding, table.c.due_at), else_=null()),
        version=table.c.version + 1,
        **_NO_LAPSE,
    )
)
_REPLACE = (
    update(table)
    .where(*_OF_JOB, table.c.version == bindparam("of_version"))
    .values({column.name: bindparam(column.name) for column in table.c if not column.primary_key})
)
_FORGET = delete(table).where(
    table.c.updated_at < bindparam("moment"),
    table.c.due_at.is_(None),
    or_(table.c.expires_at.is_(None), table.c.lapsed_at.is_not(None)),
)


class SqlLeases:
    """Leases by project and job, in a database."""

    def __init__(self, database: Database, *, shared: bool = False) -> None:
        self.shared = shared
        self._database = database

    async def find(self, project: ProjectId, job: str) -> Lease | None:
        """The lease of a job, in force or not."""
        where = {"of_project": project, "of_job": job}
        row = await self._database.read(
            lambda connection: connection.execute(_FIND, where).mappings().first()
        )
        return None if row is None else _lease(row)

    async def of_project(self, project: ProjectId) -> list[Lease]:
        """All leases of a project, in force or not, by job."""
        return await self._all(_OF_PROJECT, of_project=project)

    async def take(self, project: ProjectId, job: str, terms: Terms) -> Lease:
        """Begin the next epoch, whoever holds the one before; under its own key it has begun."""
        row = asdict(first_lease(project, job, terms))

        def work(connection: Connection) -> Lease:
            taken = connection.execute(_take(connection.dialect.name), row).mappings().first()
            if taken is None:
                where = {"of_project": project, "of_job": job}
                taken = connection.execute(_FIND, where).mappings().one()
            return _lease(taken)

        return await self._database.write(work)

    async def renew(self, project: ProjectId, job: str, epoch: int, terms: Terms) -> Lease | None:
        """Hold an epoch for longer; None if it is not held any more, or never was."""
        if epoch > MAX_EPOCH:
            return None
        values = {
            "of_project": project,
            "of_job": job,
            "of_epoch": epoch,
            **{k: v for k, v in asdict(terms).items() if k not in {"expires_at", "key"}},
            "new_expiry": terms.expires_at,
        }
        row = await self._database.write(lambda c: c.execute(_RENEW, values).mappings().first())
        return None if row is None else _lease(row)

    async def release(self, project: ProjectId, job: str, epoch: int, at: float) -> bool:
        """Give an epoch back; False if it is not held any more, or never was."""
        if epoch > MAX_EPOCH:
            return False
        values = {"of_project": project, "of_job": job, "of_epoch": epoch, "at": at}
        return await self._database.write(lambda c: c.execute(_RELEASE, values).rowcount == 1)

    async def due(self, moment: float) -> list[Lease]:
        """Leases to be looked at by then, the longest due first."""
        return await self._all(_DUE, moment=moment)

    async def nearest(self, after: float) -> float | None:
        """When the next one is due after that moment; None = none is."""

        def work(connection: Connection) -> float | None:
            found: float | None = connection.execute(_NEAREST, {"moment": after}).scalar()
            return found

        return await self._database.read(work)

    async def replace(self, seen: Lease, wanted: Lease) -> Lease | None:
        """Write a lease down anew; None if it has changed since it was seen."""
        written = replace(wanted, version=seen.version + 1)
        values = asdict(written)
        where = {"of_project": seen.project, "of_job": seen.job, "of_version": seen.version}
        del values["project"], values["job"]
        changed = await self._database.write(lambda c: c.execute(_REPLACE, values | where).rowcount)
        return written if changed else None

    async def forget_before(self, moment: float) -> int:
        """Drop leases that nobody has held since a moment; how many."""
        return await self._database.write(lambda c: c.execute(_FORGET, {"moment": moment}).rowcount)

    async def _all(self, query: Any, **values: object) -> list[Lease]:
        rows = await self._database.read(lambda c: c.execute(query, values).mappings().all())
        return [_lease(row) for row in rows]


@cache
def _take(dialect: str) -> Any:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    given = insert.excluded
    return insert.on_conflict_do_update(
        index_elements=[table.c.project, table.c.job],
        set_={
            **{name: given[name] for name in ("holder", "ttl_s", "expires_at")},
            **{name: given[name] for name in ("on_lapse", "on_superseded")},
            **{name: given[name] for name in ("taken_at", "updated_at", "key")},
            "epoch": table.c.epoch + 1,
            "version": table.c.version + 1,
            "superseding": literal_column("true"),
            "due_at": given.taken_at,
            **_NO_LAPSE,
        },
        where=or_(given.key == "", table.c.key != given.key),
    ).returning(*table.c)


def _lease(row: RowMapping) -> Lease:
    return Lease(**{str(name): value for name, value in row.items()})
