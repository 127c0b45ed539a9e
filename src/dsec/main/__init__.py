"""Composition roots, one per process, and the all-in-one.

Start reading at `command.py` (the `dsec` command), then `all_in_one.py`. Imports of whole rooms are
made inside functions here, so that `dsec --help` does not load a server.
"""
