"""The tables. Times are seconds since the epoch. Changed only together with a migration."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

projects = Table(
    "projects",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("parent", String(64), ForeignKey("projects.id"), nullable=True),
    Column("name", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

principals = Table(
    "principals",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), ForeignKey("projects.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", String(16), nullable=False),
    # JSON: {project: [permission, ...]}. Read whole, never searched.
    Column("grants", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("digest", LargeBinary(32), primary_key=True),
    Column("principal", String(64), ForeignKey("principals.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
)

creation_claims = Table(
    "creation_claims",
    metadata,
    Column("project", String(64), primary_key=True),
    Column("key", String(256), primary_key=True),
    Column("sandbox", String(64), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Index("ix_creation_claims_created_at", "created_at"),
)

leases = Table(
    "leases",
    metadata,
    Column("project", String(64), primary_key=True),
    Column("job", String(128), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", String(64), nullable=False),
    Column("ttl_s", Double, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("on_lapse", String(16), nullable=False),
    Column("on_superseded", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("taken_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("superseding", Boolean, nullable=False),
    Column("lapsed_at", Double, nullable=True),
    Column("lapsing", Boolean, nullable=False),
    Column("due_at", Double, nullable=True),
    Column("key", String(256), nullable=False),
    Column("version", BigInteger, nullable=False),
    Index("ix_leases_due_at", "due_at"),
)
