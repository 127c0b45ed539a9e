"""The `dsec` command, a user of the platform: sees the SDK only.

Start at `app.py`, which lists the verbs. `boundary.py` is where errors become a line and an exit
status, `output.py` where text from a sandbox becomes fit for a terminal, `attach.py` where a command
and this terminal are joined. The verbs that start servers are added by `dsec.main`.
"""
