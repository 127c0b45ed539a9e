"""The only room that knows SQL: SQLite embedded, PostgreSQL for many.

Start reading at `tables.py`. `database.py` opens and migrates; `keys.py` implements
`dsec.iam.directory`, `claims.py` and `leases.py` what `dsec.control` asks for; `memory.py`
is the twin of all for tests and passes the same contract.
"""
