"""Message shapes only: what crosses a process boundary, as msgspec structs. No behaviour.

`sandbox.py` is shared by the public API and the edge; `frames.py` is the channel to aether;
`launch.py` is what the edge hands to `aether launch`.
"""
