"""Principals, projects and keys in SQL: implements `dsec.iam.directory.Directory`."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, Insert, Row, Table, select, update
from sqlalchemy.dialects import postgresql, sqlite

from dsec.base.clock import Clock
from dsec.base.errors import NotFound
from dsec.base.ids import PrincipalId, ProjectId
from dsec.iam.permissions import OWNER, Permission
from dsec.iam.principals import Grant, KeyFacts, Principal
from dsec.iam.projects import Project, ProjectTree
from dsec.store.database import Database
from dsec.store.tables import api_keys, principals, projects

ALL = "*"


def insert_or_ignore(connection: Connection, table: Table) -> Insert:
    """An INSERT that leaves a row with the same primary key as it is."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


class SqlDirectory:
    """Facts for decisions, in a database."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def find_key(self, digest: bytes) -> KeyFacts | None:
        """What is known about the key with that digest."""
        query = (
            select(
                principals.c.id,
                principals.c.name,
                principals.c.kind,
                principals.c.project,
                principals.c.grants,
                api_keys.c.expires_at,
                api_keys.c.revoked_at,
            )
            .join(principals, principals.c.id == api_keys.c.principal)
            .where(api_keys.c.digest == digest)
        )
        row = await self._database.read(lambda connection: connection.execute(query).first())
        return None if row is None else _key_facts(row)

    async def tree(self) -> ProjectTree:
        """All projects."""
        query = select(projects.c.id, projects.c.parent)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return ProjectTree({row.id: row.parent for row in rows})

    async def add_project(self, project: Project) -> None:
        """Add a project. Raises NotFound if its parent does not exist."""

        def work(connection: Connection) -> None:
            if project.parent is not None:
                _require(connection, projects, project.parent, "project")
            self._add(connection, projects, id=project.id, parent=project.parent, name=project.name)

        await self._database.write(work)

    async def add_principal(self, principal: Principal) -> None:
        """Add a principal with its grants. Raises NotFound if its project does not exist."""
        grants = {grant.project: _written(grant.permissions) for grant in principal.grants}

        def work(connection: Connection) -> None:
            _require(connection, projects, principal.project, "project")
            self._add(
                connection,
                principals,
                id=principal.id,
                project=principal.project,
                name=principal.name,
                kind=principal.kind,
                grants=msgspec.json.encode(grants).decode(),
            )

        await self._database.write(work)

    async def add_key(
        self, digest: bytes, principal: PrincipalId, name: str, expires_at: float | None = None
    ) -> None:
        """Add a key. Raises NotFound if its principal does not exist."""

        def work(connection: Connection) -> None:
            _require(connection, principals, principal, "principal")
            self._add(
                connection,
                api_keys,
                digest=digest,
                principal=principal,
                name=name,
                expires_at=expires_at,
            )

        await self._database.write(work)

    async def revoke_key(self, digest: bytes) -> None:
        """Make a key useless from now on. Raises NotFound."""
        change = (
            update(api_keys).where(api_keys.c.digest == digest).values(revoked_at=self._clock.now())
        )
        if await self._database.write(lambda c: c.execute(change).rowcount) == 0:
            raise NotFound("no such key", kind="key")

    def _add(self, connection: Connection, table: Table, **values: Any) -> None:
        row = {**values, "created_at": self._clock.now()}
        connection.execute(insert_or_ignore(connection, table).values(row))


def _require(connection: Connection, table: Table, wanted: str, kind: str) -> None:
    if connection.execute(select(table.c.id).where(table.c.id == wanted)).first() is None:
        raise NotFound(f"no {kind} {wanted!r}", kind=kind)


def _key_facts(row: Row[*tuple[Any, ...]]) -> KeyFacts:
    identity, name, kind, project, grants, expires_at, revoked_at = row
    granted = msgspec.json.decode(grants, type=dict[str, list[str]])
    return KeyFacts(
        principal=Principal(
            id=PrincipalId(identity),
            name=name,
            kind=kind,
            project=ProjectId(project),
            grants=tuple(Grant(ProjectId(p), _rights(names)) for p, names in granted.items()),
        ),
        expires_at=expires_at,
        revoked_at=revoked_at,
    )


def _written(rights: frozenset[Permission]) -> list[str]:
    """An owner's rights are stored as such, so that an owner has those that are added later."""
    return [ALL] if rights == OWNER else sorted(rights)


def _rights(names: list[str]) -> frozenset[Permission]:
    if ALL in names:
        return OWNER
    known = frozenset(Permission)
    # A right this version does not know was granted by a newer one; it opens nothing.
    return frozenset(Permission(name) for name in names if name in known)
