"""A disk of its own for a sandbox whose writable layer has a limit.

    <state>/disks/<MiB>-<revision>.ext4    an empty file system of each size asked for, copied per sandbox
    <sandbox>/disk.ext4                    the sandbox's copy, with holes
    <sandbox>/disk/                        where that is mounted, by a loop device

The mount is the only thing to undo: the device goes with its last user, the file with the
sandbox's directory. It can be made larger while it is used, never smaller. All of it blocks: call
it in threads. Why not quotas: decision 24.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsec.base.errors import CapacityUnavailable, InternalError, StartFailed, Unsupported
from dsec.base.quantity import MIB, format_size
from dsec.images import disk
from dsec.linux import ext4, loop, mounts
from dsec.linux.process import CommandFailed
from dsec.linux.sparse import copy_sparse

logger = logging.getLogger("dsec.edge.disk")

DISK = "disk"
"""The mount, in a sandbox's own directory."""
IMAGE = "disk.ext4"
MAX_TEMPLATES = 32
WORTH_DROPPING_BYTES = 16 * MIB
"""From here on, dropping what is not written yet is worth the line it puts into the kernel's log."""
_NONE_LEFT = frozenset({errno.ENOSPC, errno.EBUSY, errno.ENOMEM, errno.EAGAIN})


@dataclass(frozen=True)
class DiskUse:
    """How full a disk is."""

    used_bytes: int
    limit_bytes: int


class Disks:
    """The disks of a node's sandboxes. Keeps nothing but empty ones: the mounts tell the rest."""

    def __init__(self, state: Path) -> None:
        """`state`: the edge's state directory; sandboxes' directories are on its file system."""
        self._state = state
        self._templates = state / "disks"
        self._formatting = threading.Lock()

    def prepare(self) -> None:
        """Make the directory of empty disks, and drop what a crash left half made."""
        self._templates.mkdir(mode=0o700, parents=True, exist_ok=True)
        for scratch in self._templates.glob(".*"):
            scratch.unlink(missing_ok=True)

    def make(self, directory: Path, size_mb: int) -> None:
        """Make a sandbox's disk and mount it. What a failure leaves, `remove` removes.

        Args:
            directory: the sandbox's own.
            size_mb: what it may write, MiB.

        Raises:
            CapacityUnavailable: the node has not that much room, or no loop device left.
            StorageFull: its disk became full. StartFailed: with details step, path, errno.
        """
        self._check_room(size_mb)
        image, target = directory / IMAGE, directory / DISK
        with _step("copy disk", image):
            self._copy(size_mb, image)
            target.mkdir(mode=0o700, exist_ok=True)
        with _device(image) as device, _step("mount disk", target):
            ext4.mount_scratch(device, target)

    def _check_room(self, size_mb: int) -> None:
        found = os.statvfs(self._state)
        free = found.f_bavail * found.f_frsize
        if free < size_mb * MIB:
            raise CapacityUnavailable(
                f"limits.disk_mb is {size_mb} and the node's disk has {format_size(free)} left",
                asked_mb=size_mb,
                free_bytes=free,
            )

    def _copy(self, size_mb: int, image: Path) -> None:
        source = self._template(size_mb)
        try:
            target = os.open(image, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                copy_sparse(source, target)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _template(self, size_mb: int) -> int:
        """A descriptor of an empty disk, which stays good if its file is dropped."""
        path = self._templates / f"{size_mb}-{ext4.REVISION}.ext4"
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with self._formatting:
            if not path.exists():
                self._make_room_for_one()
                self._format(path, size_mb)
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _format(self, path: Path, size_mb: int) -> None:
        scratch = path.with_name(f".{path.name}")
        try:
            ext4.format_image(scratch, size_mb * MIB)
            disk.fsync_path(scratch)  # or after a power cut its name may stand for zeros
            scratch.rename(path)
        finally:
            scratch.unlink(missing_ok=True)

    def _make_room_for_one(self) -> None:
        oldest_first = sorted(self._templates.glob("*.ext4"), key=lambda path: path.stat().st_mtime)
        for path in oldest_first[: -MAX_TEMPLATES + 1]:
            path.unlink(missing_ok=True)

    def grow(self, directory: Path, size_mb: int) -> None:
        """Make a sandbox's disk larger while it is used; one that is as large already is left alone.

        Its size is that of an empty disk of `size_mb`: bookkeeping and all.

        Raises:
            CapacityUnavailable: the node has not that much room.
            Unsupported: this edge may not. StorageFull: the node's disk is full.
            InternalError: it went wrong otherwise; what is on it is as it was.
        """
        image, target = directory / IMAGE, directory / DISK
        with _growing(target):
            device, size = loop.device_of(target), self._size_of_empty(size_mb)
            if ext4.size_of(device) >= size:
                return
            self._check_room(size_mb)
            # First the file, then the device, then what is on it: each fits into the one before,
            # and where it ends early the next try goes on.
            if image.stat().st_size < size:
                os.truncate(image, size)
            loop.take_size(device)
            ext4.grow(target, size)

    def _size_of_empty(self, size_mb: int) -> int:
        template = self._template(size_mb)
        try:
            return ext4.size_of(Path(f"/proc/self/fd/{template}"))
        finally:
            os.close(template)

    def remove(self, directory: Path) -> bool:
        """Unmount a sandbox's disk; whether there was one. Its processes have ended. Idempotent.

        Raises:
            OSError: naming the call and the path.
        """
        target = directory.resolve() / DISK
        if not target.is_dir():
            return False
        found = False
        while mounts.is_mounted(target):
            found = True
            _drop_unwritten(target)
            # Lazily: whatever still looks at it from outside must not keep the sandbox from ending.
            mounts.umount(target, detach=True)
        return found

    def use(self, directory: Path, size_mb: int) -> DiskUse:
        """How full a sandbox's disk is; nothing of it is walked. All zero if it is not mounted."""
        target = directory / DISK
        try:
            if target.stat().st_dev == directory.stat().st_dev:
                return DiskUse(0, 0)
            return DiskUse(_used_bytes(target), size_mb * MIB)
        except OSError:  # on its way out
            return DiskUse(0, 0)

    def strays(self, known: frozenset[str]) -> list[str]:
        """Unmount disks below the state directory whose sandbox is not `known`.

        Returns the sandboxes' directories' names.
        """
        removed = []
        for mount in mounts.mounts_under(self._state.resolve()):
            target = Path(mount.target)
            if target.name == DISK and mount.fstype == "ext4" and target.parent.name not in known:
                self.remove(target.parent)
                removed.append(target.parent.name)
        return removed


def _drop_unwritten(target: Path) -> None:
    """Nobody will read it again, and unmounting would write out all that is not written yet."""
    try:
        if _used_bytes(target) >= WORTH_DROPPING_BYTES:
            ext4.give_up(target)
    except OSError:
        logger.warning("a disk is unmounted the slow way", extra={"path": str(target)})


def _used_bytes(target: Path) -> int:
    found = os.statvfs(target)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@contextlib.contextmanager
def _growing(target: Path) -> Iterator[None]:
    try:
        yield
    except CommandFailed as exc:
        raise InternalError(f"the disk could not be made larger: {exc}") from exc
    except OSError as exc:
        if exc.errno in disk.FULL:
            raise disk.storage_full(target.parent) from exc
        if exc.errno == errno.EPERM:
            raise Unsupported("disk_mb: to grow a disk the edge needs CAP_SYS_RESOURCE") from exc
        raise InternalError(f"the disk could not be made larger: {exc}") from exc


@contextlib.contextmanager
def _step(name: str, path: Path) -> Iterator[None]:
    """Say in which step a launch failed.

    Raises:
        StorageFull: the node's disk is full. StartFailed: all else.
    """
    try:
        yield
    except CommandFailed as exc:
        raise StartFailed(f"{name}: {exc}", step=name, path=str(path)) from exc
    except OSError as exc:
        if exc.errno in disk.FULL:
            raise disk.storage_full(path.parent) from exc
        raise StartFailed(f"{name}: {exc}", step=name, path=str(path), errno=exc.errno) from exc


@contextlib.contextmanager
def _device(image: Path) -> Iterator[Path]:
    """A loop device for the time it takes to mount it.

    Raises:
        CapacityUnavailable: none is left. StartFailed: it cannot be made for another reason.
    """
    with contextlib.ExitStack() as held:
        with _step("attach loop device", image):
            try:
                device = held.enter_context(loop.attached(image, ext4.BLOCK_BYTES))
            except OSError as exc:
                if exc.errno in _NONE_LEFT:
                    raise CapacityUnavailable(f"no loop device is to be had: {exc}") from exc
                raise
        yield device
