"""Looks an environment over for what spoils an evaluation: answers, future history, secrets, ...

Start at `engine.py` (`lint`), then `rules/__init__.py` (the families of rules). `environment.py` is
what rules look at: names and attributes in memory, content by a callable. The engine is pure and
synchronous; content is hostile, so `run.py` runs it in a child process (`child.py`) with bounds on
time and memory. `git/` reads repositories without running git on them.
"""
