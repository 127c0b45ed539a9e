"""HTTP in, control call, HTTP out; operations on a sandbox are passed through to its edge.

Start reading at `gateway.py`, where every request comes in; `rest_v1/` has the tables of routes.
"""
