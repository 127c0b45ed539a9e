"""Files written so that a crash leaves the old one or the new one, and a full disk says so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from dsec.base.errors import StorageFull

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def full_disk_named(where: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into the error a caller can act on.

    Raises:
        StorageFull: the body ran out of space.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise storage_full(where) from error
        raise


def storage_full(where: Path) -> StorageFull:
    """The error for a disk that is full."""
    return StorageFull(
        f"the disk of {where} is full; remove images or make room. Nothing partial was kept",
        path=str(where),
    )


def fsync_path(path: Path) -> None:
    """Push a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, scratch: Path) -> None:
    """Write a whole file: beside the others in `scratch`, synced, then renamed into place."""
    temporary = scratch / f"{uuid.uuid4().hex}.write"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it, or a file; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
