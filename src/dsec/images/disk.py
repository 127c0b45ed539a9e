"""Files written so that a crash leaves the old one or the new one, and a full disk says so."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from dsec.base.errors import StorageFull
from dsec.linux.process import CommandFailed, run

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMOVE_TIMEOUT_S = 3600.0


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
    """Remove a directory and all in it, or a file; nothing there is fine. Blocks.

    Raises:
        OSError: something cannot be removed.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except (RecursionError, OSError):
        _remove_thoroughly(path)


def _remove_thoroughly(path: Path) -> None:
    """By rm, which needs no stack and no descriptor per level: trees from a sandbox may be deep."""
    argv = ["rm", "-rf", "--one-file-system", "--", str(path)]
    try:
        run(argv, timeout_s=_REMOVE_TIMEOUT_S)
    except CommandFailed as exc:
        raise OSError(errno.EIO, f"it cannot be removed: {exc.stderr.strip()}", str(path)) from exc


def digest_of_bytes(content: bytes) -> str:
    """`sha256:<hex>` of some bytes."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
