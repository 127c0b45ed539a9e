"""Leases of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("job", sa.String(128), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("ttl_s", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=True),
        sa.Column("on_lapse", sa.String(16), nullable=False),
        sa.Column("on_superseded", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("taken_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("superseding", sa.Boolean, nullable=False),
        sa.Column("lapsed_at", sa.Double, nullable=True),
        sa.Column("lapsing", sa.Boolean, nullable=False),
        sa.Column("due_at", sa.Double, nullable=True),
        sa.Column("key", sa.String(256), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("project", "job", name="pk_leases"),
    )
    op.create_index("ix_leases_due_at", "leases", ["due_at"])


def downgrade() -> None:
    op.drop_table("leases")
