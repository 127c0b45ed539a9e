"""Data of layers fetched when it is read: one core, two thin fronts, in a process of their own.

A node has one filler: a keeper (`keeper.py`), which holds the kernel's descriptors and nothing
else, and its child, the worker (`worker.py`), which may be killed at any moment: the keeper starts
it again, readers wait and get their data. The edge speaks to the worker over a socket
(spec/filler.md). `interface.py` is the seam between core and fronts.
"""
