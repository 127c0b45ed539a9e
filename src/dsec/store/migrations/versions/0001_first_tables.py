"""The first tables: projects, principals, API keys, creation claims."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("parent", sa.String(64), nullable=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.ForeignKeyConstraint(["parent"], ["projects.id"], name="fk_projects_parent"),
    )
    op.create_table(
        "principals",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("grants", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_principals"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name="fk_principals_project"),
    )
    op.create_table(
        "api_keys",
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("principal", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=True),
        sa.Column("revoked_at", sa.Double, nullable=True),
        sa.PrimaryKeyConstraint("digest", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["principal"], ["principals.id"], name="fk_api_keys_principal"),
    )
    op.create_table(
        "creation_claims",
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("key", sa.String(256), nullable=False),
        sa.Column("sandbox", sa.String(64), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("settled", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("project", "key", name="pk_creation_claims"),
    )
    op.create_index("ix_creation_claims_created_at", "creation_claims", ["created_at"])


def downgrade() -> None:
    for table in ("creation_claims", "api_keys", "principals", "projects"):
        op.drop_table(table)
