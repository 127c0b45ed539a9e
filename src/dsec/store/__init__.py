"""The only room that knows SQL: SQLite embedded, PostgreSQL for many."""
