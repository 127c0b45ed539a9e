"""Metadata images in EROFS: written and read here, mounted by `dsec.linux.mounts`.

An image holds names and attributes; the contents of files lie in data files beside it, its devices,
which may be fetched when they are read. Start at `tree.py`; `write.py` and `read.py` turn trees into
images and back, `scan.py` makes a tree of a directory, `merge.py` one of several. `format.py` is
what the kernel wants.
"""
