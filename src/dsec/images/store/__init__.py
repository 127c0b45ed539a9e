"""Where environments lie when they are not on the node: blobs by digest, documents by name.

`interface.py` is the seam; `opening.py` turns a URL into a store. What the blobs and documents
hold is written in spec/formats.md.
"""
