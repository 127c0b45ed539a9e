"""Use cases of the control plane, one file per noun. Meets the edge only in `dsec.wire`.

Start reading at `sandboxes.py`. `edges.py` holds the edges this process knows and how full they
are. An edge in the same process is called directly; `remote.py` speaks to one over HTTP.
"""
