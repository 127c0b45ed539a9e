"""The images of a node: what the edge calls.

    async with ImageService(root, run_dir) as images:
        async for event in images.pull(PullImage(reference="registry.test/tools:1")): ...
        record = await images.resolve("debian")
        layers = await images.mount(record, sandbox_id)     # topmost first, as overlayfs has it
        ...
        await images.release(sandbox_id)

Imports run as tasks of the service, shared between callers who ask for the same; one whose last
watcher leaves is cancelled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
)
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import (
    Conflict,
    DsecError,
    InternalError,
    InvalidRequest,
    NotFound,
    Unsupported,
)
from dsec.images import debian, disk
from dsec.images.catalog import Catalog
from dsec.images.compose import plan_layers
from dsec.images.importer import DEFAULT_LIMITS, Importer, file_digest, is_import
from dsec.images.jobs import ImageEvent, Job, Jobs, finish
from dsec.images.layers import LayerStore
from dsec.images.names import ImageName, image_name, name_of_reference
from dsec.images.oci.tree import Limits
from dsec.images.records import ImageRecord, view
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import BuildImage, ImageProgress, ImageView, PullImage

__all__ = ["ImageEvent", "ImageService", "finish"]

logger = logging.getLogger("dsec.images")

_RECEIVE_STEP_BYTES = 8 << 20
_LOCK_PATIENCE_S = 2.0


class ImageService:
    """Images under `root`, mounted under `run_dir/layers`. An asynchronous context manager."""

    def __init__(
        self,
        root: Path,
        run_dir: Path,
        *,
        clock: Clock | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.layers = LayerStore(root, run_dir)
        self._root = root.absolute()
        self._tmp = self._root / "tmp"
        self._catalog = Catalog(root)
        clock = clock or SystemClock()
        self._importer = Importer(root, self.layers, self._catalog, clock, limits)
        self._tasks = anyio.create_task_group()
        self._jobs = Jobs(self._tasks)
        self._lock_file = -1

    async def __aenter__(self) -> Self:
        """Take the store, sweep what a crash left, read the records, adopt mounts.

        Raises:
            Conflict: another process has the store.
            InternalError: a record is damaged.
        """
        await in_thread("disk", self._open)
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel imports under way; unmount what no sandbox that lives on stands on."""
        self._tasks.cancel_scope.cancel()
        try:
            # Not told of the body's error, which would come out wrapped in a group.
            await self._tasks.__aexit__(None, None, None)
            with anyio.CancelScope(shield=True):
                await self.unmount_unused()
        finally:
            os.close(self._lock_file)

    def _open(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock_file = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self._sweep()
            self.layers.open()
            self._catalog.open()
        except BaseException:
            os.close(self._lock_file)
            raise

    def _lock(self) -> None:
        """Take the lock. A program a killed edge was just starting may hold it for a moment longer."""
        until = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Conflict(f"another process uses the images in {self._root}") from None
                time.sleep(0.01)  # noqa: TID251 - in a worker thread
            else:
                return

    def _sweep(self) -> None:
        """Remove what a crash left in `tmp`.

        Moved aside first: a program that outlived the crash finds its paths gone and ends, and what
        it still writes meanwhile is swept the next time.
        """
        if self._tmp.exists():
            self._tmp.rename(self._root / f"swept-{uuid.uuid4().hex}")
        for left in self._root.glob("swept-*"):
            with contextlib.suppress(OSError):  # swept the next time
                disk.remove_tree(left)

    # -- images -------------------------------------------------------------------------------

    async def resolve(self, name: str) -> ImageRecord:
        """The image of a name; without a tag, `latest`.

        Raises:
            InvalidRequest: it is no name.
            NotFound: (kind image) there is none; the message lists near names.
        """
        return self._catalog.get(name)

    async def remove(self, name: str) -> None:
        """Forget an image, and remove the layers nothing needs any more.

        Raises:
            NotFound: no image has this name.
            Conflict: a sandbox uses it.
        """
        record = self._catalog.get(name)
        if users := self._users_of(record):
            raise Conflict(
                f"image {record.name!r} is used by {', '.join(users[:5])}",
                kind="image",
                users=len(users),
            )
        await in_thread("disk", self._remove, record.name)

    def _users_of(self, record: ImageRecord) -> list[str]:
        """Sandboxes whose image this is: of the images their layers contain, the largest."""
        others = [r.layers for r in self._catalog.records() if r.name != record.name]
        users = []
        for owner in self.layers.pinned_by(record.layers[-1]):
            pinned = self.layers.pins_of(owner)
            better = [o for o in others if len(o) >= len(record.layers) and pinned.issuperset(o)]
            if pinned.issuperset(record.layers) and not better and not is_import(owner):
                users.append(owner)
        return sorted(users)

    def _remove(self, name: str) -> None:
        record = self._catalog.remove(name)
        for digest in set(record.layers):
            with contextlib.suppress(NotFound, Conflict):
                self.layers.remove(digest, self._has_image)

    def _has_image(self, digest: str) -> bool:
        return digest in self._catalog.layers_in_use()

    async def collect(self) -> list[str]:
        """Remove layers no image has and nobody pinned.

        Done after each import: one that failed may leave some, and so does the image it replaced.
        Not at the start: nobody has said then which layers the sandboxes that live on need.

        Returns:
            Their digests.
        """
        return await in_thread("disk", self._collect)

    def _collect(self) -> list[str]:
        removed = []
        for digest in self.layers.digests():
            with contextlib.suppress(NotFound, Conflict):
                self.layers.remove(digest, self._has_image)
                removed.append(digest)
        return removed

    # -- imports ------------------------------------------------------------------------------

    def _watch(
        self, key: Hashable, work: Callable[[Job], Awaitable[ImageView]]
    ) -> AsyncGenerator[ImageEvent, None]:
        async def collected(job: Job) -> ImageView:
            try:
                return await work(job)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._collect_quietly()

        return self._jobs.watch(key, collected)

    async def _collect_quietly(self) -> None:
        try:
            await self.collect()
        except (DsecError, OSError):  # it is no part of the import, and tried after the next one
            logger.exception("layers nobody needs could not be removed")

    def pull(self, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Import from a registry; progress, then `ImageReady`.

        Raises:
            InvalidRequest: reference or name are wrong, or the image is damaged.
            NotFound, PermissionDenied, Unavailable: as the registry says.
            Unsupported: nothing in it fits this host, or skopeo is missing.
            StorageFull: no room.
        """
        reference, tls_verify = request.reference, request.tls_verify
        name = image_name(request.name) if request.name else name_of_reference(reference)

        async def work(job: Job) -> ImageView:
            return await self._importer.pull(job, reference, name, tls_verify=tls_verify)

        return self._watch(("pull", reference, name, tls_verify), work)

    def build(self, request: BuildImage) -> AsyncIterator[ImageEvent]:
        """Build a distribution image; progress, then `ImageReady`.

        Without a name it becomes `debian:<suite>`, and `debian:latest` too if it is the node's
        own release.

        Raises:
            Unsupported: the node is not Debian, or mmdebstrap is missing.
            InvalidRequest: no such package or suite.
            Unavailable: the mirror cannot be reached.
            StorageFull: no room.
        """
        chosen = image_name(request.name) if request.name else None
        packages = tuple(request.packages)

        async def work(job: Job) -> ImageView:
            planned = await in_thread("disk", debian.plan, request.suite, packages)
            names = [chosen] if chosen else _debian_names(planned)
            return await self._importer.build_debian(job, planned, names)

        return self._watch(("debian", request.suite, chosen, packages), work)

    def import_path(self, path: Path, name: str) -> AsyncIterator[ImageEvent]:
        """Import a file or directory of this host: OCI, `docker save`, or a root file system.

        Raises:
            NotFound: (kind path) there is none.
            InvalidRequest: it is none of these, damaged, cut short or hostile.
            PayloadTooLarge: it exceeds the limits.
            Unsupported: nothing in it fits this host, or a program is missing.
            StorageFull: no room.
        """
        checked, where = image_name(name), path.absolute()

        async def work(job: Job) -> ImageView:
            return await self._importer.import_path(job, where, checked, str(where))

        return self._watch(("path", where, checked), work)

    async def import_archive(
        self, name: str, archive: AsyncIterator[bytes]
    ) -> AsyncGenerator[ImageEvent, None]:
        """Import an archive as it streams in; see `import_path` for what it may be.

        Raises:
            As `import_path`.
        """
        checked = image_name(name)
        directory = self._tmp / f"upload-{uuid.uuid4().hex}"
        upload = directory / "archive"
        taken = False
        try:
            await in_thread("disk", lambda: directory.mkdir(mode=0o700))
            async with contextlib.aclosing(_receive(archive, upload)) as received:
                async for done in received:
                    yield ImageProgress(step="receiving", done=done)
            digest = await in_thread("build", file_digest, upload)

            async def work(job: Job) -> ImageView:
                try:
                    source = f"archive {digest}"
                    return await self._importer.import_upload(job, upload, checked, source)
                finally:
                    await _remove(directory)

            key = ("archive", digest, checked)
            # The job may outlive this caller, others having joined: then the file is the job's.
            taken = not self._jobs.running(key)
            async with contextlib.aclosing(self._watch(key, work)) as events:
                async for event in events:
                    yield event
        finally:
            if not taken:
                await _remove(directory)

    # -- sandboxes ----------------------------------------------------------------------------

    async def mount(self, record: ImageRecord, sandbox: str) -> list[Path]:
        """Mount an image's layers, each once per host, and pin them for a sandbox.

        Returns:
            The mounted directories, topmost first, as overlayfs has it.

        Raises:
            NotFound: (kind layer) one has been removed meanwhile.
            Unsupported: the store's file system cannot carry images.
            InternalError: the kernel refused.
        """
        wanted = plan_layers(record.layers)
        self.layers.pin(wanted, sandbox)
        known = [path for digest in wanted if (path := self.layers.mounted(digest))]
        if len(known) == len(wanted):
            return known
        try:
            return await in_thread("mount", self.layers.mount_all, wanted)
        except OSError as error:
            self.layers.unpin(sandbox)
            raise _mount_failure(record.name, self._root, error) from error
        except BaseException:
            self.layers.unpin(sandbox)
            raise

    async def release(self, sandbox: str) -> None:
        """A sandbox needs its layers no more. They stay mounted until `unmount_unused`."""
        self.layers.unpin(sandbox)

    def rebuild_pins(self, pins: Iterable[tuple[str, Iterable[str]]]) -> None:
        """After a restart: which sandbox uses which layers (digests, any order)."""
        for sandbox, digests in pins:
            self.layers.pin(digests, sandbox)

    async def unmount_unused(self) -> list[str]:
        """Unmount the layers no sandbox uses; their digests."""
        return await in_thread("mount", self.layers.unmount_unused)

    async def list(self) -> list[ImageView]:
        """All images, by name."""
        return [view(record) for record in self._catalog.records()]


def _debian_names(planned: debian.Plan) -> list[ImageName]:
    by_suite = image_name(f"debian:{planned.suite}")
    return [image_name("debian"), by_suite] if planned.is_own_suite else [by_suite]


def _mount_failure(name: str, root: Path, error: OSError) -> DsecError:
    if error.errno == errno.ENOTBLK:  # what EROFS says of a file it cannot read by itself
        return Unsupported(
            f"the file system of {root} cannot carry images; keep the state directory on ext4, xfs "
            "or btrfs"
        )
    return InternalError(f"cannot mount image {name!r}: {error}")


async def _remove(directory: Path) -> None:
    with anyio.CancelScope(shield=True):
        await in_thread("disk", disk.remove_tree, directory)


async def _receive(archive: AsyncIterator[bytes], path: Path) -> AsyncGenerator[int, None]:
    """Write a stream to a file, in worker threads; yields the bytes so far now and then."""
    done = told = 0
    with disk.full_disk_named(path.parent):
        file = await in_thread("disk", lambda: path.open("xb"))
        try:
            async for chunk in archive:
                await in_thread("disk", file.write, chunk)
                done += len(chunk)
                if done - told >= _RECEIVE_STEP_BYTES:
                    told = done
                    yield done
        finally:
            await in_thread("disk", file.close)
    if not done:
        raise InvalidRequest("the archive is empty")
    yield done
