"""Control groups, v1 and v2 side by side.

`detect.py` finds what the host has, `plan.py` says what one sandbox gets of it (pure), `groups.py`
touches the files; one file per controller in `v1/` and `v2/`.

Layout: `<mount>/<parent>/dsec-<node>/<sandbox>`; in a v2 hierarchy with `agent` (aether, outside the
limits) and `work` (everything the sandbox runs, one child per command) below it.
"""
