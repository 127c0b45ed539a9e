"""The node agent: it makes sandboxes, keeps them, and carries every operation on them.

May know the kernel (`dsec.linux`), images, and the messages; never the control plane. Start at
`service.py` (use cases) and `lifecycle/owner.py` (what happens to one sandbox, in series). Below is the
seam `backends/interface.py`; `channel.py` speaks with aether inside; `commands.py` and `files.py`
are operations in its terms, `server.py` the same over HTTP. `admission.py`, `ttl.judge`,
`lifecycle/machine.py` decide and are pure. `sweep.py` settles the past at start.
"""
