"""How Alembic runs here: inside the transaction `dsec.store.database` has opened."""

from __future__ import annotations

from alembic import context

from dsec.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
