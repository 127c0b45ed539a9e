"""Files written so that a crash leaves the old one or the new one, and a full disk says so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from dsec.base.errors import StorageFull
from dsec.linux import mounts
from dsec.linux.files import boot_id
from dsec.linux.process import CommandFailed, run

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BOOT = "boot"
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


def install(
    final: Path, files: Mapping[str, Path], texts: Mapping[str, bytes], scratch: Path, *, sync: bool
) -> None:
    """Make a directory appear complete: built in `scratch`, then renamed into place.

    Args:
        final: the directory, which does not exist.
        files: what is moved into it, by its name there.
        texts: small files written into it.
        scratch: on the same file system.
        sync: push all of it to the disk first. What can be had again need not be: it bears the
            boot it was made in, and `drop_unsynced` removes it after another.

    Raises:
        OSError: nothing of it is left but files already moved.
    """
    staging = scratch / f"install-{uuid.uuid4().hex}"
    staging.mkdir(mode=0o700)
    try:
        for name, file in files.items():
            file.replace(staging / name)
        for name, text in texts.items():
            (staging / name).write_bytes(text)
        if sync:
            for path in (*staging.iterdir(), staging):
                fsync_path(path)
        else:
            (staging / _BOOT).write_text(boot_id())
        staging.replace(final)
    except BaseException:
        remove_tree(staging)
        raise
    if sync:
        fsync_path(final.parent)


def keep(directory: Path, files: Mapping[str, Path]) -> None:
    """Add synced files to a directory of `install`, which is synced from here on."""
    for name, file in files.items():
        file.replace(directory / name)
    for path in directory.iterdir():
        fsync_path(path)
    (directory / _BOOT).unlink(missing_ok=True)
    fsync_path(directory)


def ensure_synced(directory: Path) -> None:
    """Sync a directory of `install` that was not."""
    if (directory / _BOOT).exists():
        keep(directory, {})
        fsync_path(directory.parent)


def drop_unsynced(root: Path) -> None:
    """Remove the directories below `root` that were not synced and may not have outlived a boot."""
    for mark in root.glob(f"*/{_BOOT}"):
        if mark.read_text() != boot_id():
            remove_tree(mark.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it, or a file; nothing there is fine. Blocks.

    What is mounted below is unmounted first: a build that was killed may have left the host's own
    file systems there.

    Raises:
        OSError: something cannot be removed.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for mount in mounts.mounts_under(path.resolve()):
        mounts.umount(Path(mount.target), detach=True)
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
