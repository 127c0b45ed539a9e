"""How much of the disk a tree takes, when whoever owns the tree is not to be trusted.

Looked at through descriptors, so that a directory swapped for a link leads nowhere, and bounded in
time and depth: the answer is then less than the truth.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

MAX_DEPTH = 64
"""Also the descriptors held at once."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 512


def allocated_bytes(tree: Path, patience_s: float) -> int:
    """Bytes of disk below a directory, files with several names once; 0 if it is not there. Blocks.

    Args:
        tree: where to look.
        patience_s: how long to look; what is not found by then is left out.
    """
    until = time.monotonic() + patience_s
    seen: set[tuple[int, int]] = set()
    total = 0
    for found in _walk(tree, until):
        key = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
            if key in seen:
                continue
            seen.add(key)
        total += found.st_blocks * _BLOCK_BYTES
    return total


def _walk(tree: Path, until: float) -> Iterator[os.stat_result]:
    try:
        top = os.open(tree, _DIRECTORY)
    except OSError:
        return
    try:
        yield from _below(top, MAX_DEPTH, until)
    finally:
        os.close(top)


def _below(directory: int, depth: int, until: float) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:  # what vanishes is no more
        for entry in entries:
            if time.monotonic() > until:
                return
            with contextlib.suppress(OSError):
                found = os.stat(entry.name, dir_fd=directory, follow_symlinks=False)
                yield found
                if depth and stat.S_ISDIR(found.st_mode):
                    yield from _inside(entry.name, directory, depth - 1, until)


def _inside(name: str, parent: int, depth: int, until: float) -> Iterator[os.stat_result]:
    descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        yield from _below(descriptor, depth, until)
    finally:
        os.close(descriptor)
