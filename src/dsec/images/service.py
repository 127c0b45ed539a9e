"""The images of a node: what the edge calls.

    async with ImageService(root, run_dir) as images:
        async for event in images.pull(PullImage(reference="registry.test/tools:1")): ...
        environment = await images.environments.compose(EnvironmentRef(image="debian"))
        layers = await images.environments.mount(environment, sandbox_id)       # topmost first
        ...
        await images.environments.release(sandbox_id)

Imports run as tasks of the service, shared between callers who ask for the same; one whose last
watcher leaves is cancelled.
"""

from __future__ import annotations

import contextlib
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
)
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import (
    Conflict,
    DsecError,
    NotFound,
    Unsupported,
)
from dsec.images import debian, disk
from dsec.images.collecting import collect
from dsec.images.data import DataStore
from dsec.images.devices import Devices
from dsec.images.environments import Environments
from dsec.images.faults import Faults
from dsec.images.importer import DEFAULT_LIMITS, Importer, is_import
from dsec.images.inspection import Inspection
from dsec.images.jobs import ImageEvent, Job, Jobs, finish
from dsec.images.layers import LayerStore
from dsec.images.lazy.node import NodeFiller
from dsec.images.names import ImageName, given_name, image_name, is_snapshot, name_of_reference
from dsec.images.oci.layer import Limits
from dsec.images.publications import Publications, split_version
from dsec.images.recorder import Recorder
from dsec.images.records import ImageRecord, view
from dsec.images.shared_view import view_store
from dsec.images.sharing import Sharing
from dsec.images.shelf import Shelf
from dsec.images.snapshots import Snapshots
from dsec.images.store.interface import BlobStore
from dsec.images.traces import Traces
from dsec.images.uploads import Uploads
from dsec.images.uses import Uses
from dsec.kit.blocking import in_thread
from dsec.kit.together import survive
from dsec.wire.edge_v1 import LayerEvent
from dsec.wire.public_v1 import (
    BuildImage,
    CollectReport,
    EnvironmentRef,
    ImageReady,
    ImageView,
    LayerKind,
    LayerReady,
    LayerView,
    LintReport,
    LintRequest,
    PullImage,
    StoreView,
    TraceView,
)

__all__ = ["ImageEvent", "ImageService", "finish"]

logger = logging.getLogger("dsec.images")

TIDY_S = 120.0
END_S = 60.0
"""What the end may take; then mounts and filler stay for the next start."""
_LOCK_PATIENCE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What a node shares with others, opened by the composition root."""

    store: BlobStore | None = None
    direct: bool = False
    """Data is mounted from the store's own file system, and published for that."""
    filler: NodeFiller | None = None
    record: bool = True
    """Record a boot trace of environments that have none."""
    node: str = ""


class ImageService:
    """Images under `root`, mounted under `run_dir/layers`. An asynchronous context manager."""

    def __init__(
        self,
        root: Path,
        run_dir: Path,
        *,
        clock: Clock | None = None,
        limits: Limits = DEFAULT_LIMITS,
        shared: Shared | None = None,
    ) -> None:
        self.layers = LayerStore(root, run_dir)
        self.data = DataStore(root)
        self._root = root.absolute()
        self._tmp = self._root / "tmp"
        self._clock = clock or SystemClock()
        self._shared = shared or Shared()
        store = self._shared.store
        self._images = Shelf(self._root / "images", self._tmp, "image", ImageRecord)
        self._importer = Importer(root, self.layers, self.data, self._images, self._clock, limits)
        self._tasks = anyio.create_task_group()
        self._jobs = Jobs(self._tasks)
        self._uploads = Uploads(self._tmp, self._jobs)
        direct = store if self._shared.direct else None
        self._devices = Devices(self.data, direct, self._shared.filler)
        self._traces = Traces(root, store)
        self._recorder = Recorder(
            run_dir,
            self.layers,
            self._devices,
            self._traces,
            automatic=self._shared.record,
            tasks=self._tasks,
        )
        self._sharing = (
            Sharing(
                store,
                root,
                self.layers,
                self.data,
                direct=self._shared.direct,
                clock=self._clock,
            )
            if store is not None
            else None
        )
        self._uses = (
            Uses(store, root, self._shared.node, self._clock) if store is not None else None
        )
        self.publications = Publications(
            root, self.layers, self._importer, self._sharing, self._clock
        )
        self._faults = Faults(self._shared.filler, self._clock)
        self.environments = Environments(
            self._images,
            self.publications,
            self.layers,
            self.data,
            self._devices,
            self._recorder,
            self._traces,
            run_dir=run_dir,
            sharing=self._sharing,
            uses=self._uses,
            faults=self._faults,
            tasks=self._tasks,
            clock=self._clock,
        )
        self.snapshots = Snapshots(
            self._images,
            self._importer,
            self.layers,
            self.environments,
            sharing=self._sharing,
            limits=limits,
            tasks=self._tasks,
            clock=self._clock,
            forget=self.remove,
        )
        self._inspection = Inspection(
            self.environments, self.layers, self._devices, self._traces, self._clock
        )
        self._lock_file = -1

    async def __aenter__(self) -> Self:
        """Take the store, sweep what a crash left, read the records, adopt mounts.

        Raises:
            Conflict: another process has the store.
            InternalError: a record is damaged.
        """
        await in_thread("disk", self._open)
        await self._adopt_filler()
        await self._tasks.__aenter__()
        filler, tasks = self._shared.filler, self._tasks
        tasks.start_soon(self._faults.watch, self.environments.filler_lost)
        tasks.start_soon(self._tidy)
        self._recorder.go_on()
        self.snapshots.go_on()
        if filler is not None and self._sharing is not None and not self._shared.direct:
            tasks.start_soon(filler.warm)
        if self._uses is not None:
            tasks.start_soon(survive, self._uses.adopt, "reading what this node used before")
        return self

    async def _adopt_filler(self) -> None:
        """A filler that does not answer keeps no edge from starting: its sandboxes need one."""
        try:
            if not await self._devices.adopt():
                await self.environments.filler_lost()
        except (DsecError, OSError) as error:
            logger.warning("the filler is silent", extra={"why": str(error)})

    async def _tidy(self) -> None:
        while True:
            await anyio.sleep(TIDY_S)
            await survive(self.environments.tidy, "unmounting what nobody uses")

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
            with anyio.move_on_after(END_S, shield=True):
                await survive(self.environments.unmount_unused, "unmounting at the end")
                await self._end_idle_filler()
        finally:
            os.close(self._lock_file)

    async def _end_idle_filler(self) -> None:
        filler = self._shared.filler
        if filler is not None and filler.started and self._devices.idle:
            with contextlib.suppress(DsecError):
                await filler.shutdown()

    def _open(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock_file = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self._sweep()
            for part in (
                self.layers,
                self.data,
                self._images,
                self.publications,
                self._traces,
                self._recorder,
                self.environments,
            ):
                part.open()
            if self._uses is not None:
                self._uses.open()
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
        """The image of a name; without a tag, `latest`; from the store if it is not here.

        Raises:
            InvalidRequest: it is no name.
            NotFound: (kind image) there is none; the message lists near names.
            Unavailable: it is not here, and the store does not answer.
        """
        return await self.environments.image(name)

    async def remove(self, name: str) -> None:
        """Forget an image, here and in the store, and remove the layers nothing needs any more.

        Raises:
            NotFound: no image has this name.
            Conflict: a sandbox uses it.
        """
        record = await self.resolve(name)
        if users := self._users_of(record):
            raise Conflict(
                f"image {record.name!r} is used by {', '.join(users[:5])}",
                kind="image",
                users=len(users),
            )
        if self._images.find(record.name) is not None:
            await in_thread("disk", self._images.remove, record.name)
        try:
            if self._sharing is not None:
                await self._sharing.forget("image", record.name, record.digest)
        finally:
            await self.collect()

    def _users_of(self, record: ImageRecord) -> list[str]:
        """Sandboxes whose image this is: of the images their layers contain, the largest."""
        mounts = mounted_by(record)
        others = [mounted_by(r) for r in self._images.records() if r.name != record.name]
        users = []
        for owner in self.layers.pins.by(mounts[-1]):
            pinned = self.layers.pins.of(owner)
            better = [o for o in others if len(o) >= len(mounts) and pinned.issuperset(o)]
            if pinned.issuperset(mounts) and not better and not is_import(owner):
                users.append(owner)
        return sorted(users)

    def _has_name(self, digest: str) -> bool:
        """Whether an image, or a published version, needs the layer; as the store has it, too."""
        if digest in self.publications.digests():
            return True
        if self._sharing is not None and digest in self._sharing.names.digests():
            return True
        return any(digest in (*r.layers, *r.mounts) for r in self._images.records())

    async def collect(self) -> list[str]:
        """Remove layers no name means and nobody pinned, and the data only they needed.

        Done after each import: one that failed may leave some, and so does the image it replaced.
        Not at the start: nobody has said then which layers the sandboxes that live on need.

        Returns:
            The digests of the layers.
        """
        return await in_thread("disk", self._collect)

    def _collect(self) -> list[str]:
        removed = []
        for digest in self.layers.digests():
            with contextlib.suppress(NotFound, Conflict):
                self.layers.remove(digest, self._has_name)
                removed.append(digest)
        self.data.collect(
            lambda: {device for layer in self.layers.records() for device in layer.devices}
        )
        return removed

    # -- imports ------------------------------------------------------------------------------

    def _watch(
        self, key: Hashable, work: Callable[[Job[ImageView]], Awaitable[ImageView]]
    ) -> AsyncIterator[ImageEvent]:
        async def imported(job: Job[ImageView]) -> ImageView:
            return await self._imported(work, job)

        return self._jobs.watch(key, imported, _image_ready)

    async def _imported(
        self, work: Callable[[Job[ImageView]], Awaitable[ImageView]], job: Job[ImageView]
    ) -> ImageView:
        """An import, then its publication if there is a store."""
        try:
            made = await work(job)
        finally:
            await self._collect_quietly()
        if self._sharing is not None:
            for record in self._images.records():
                if record.digest == made.digest:  # a build may give an image several names
                    await self._sharing.publish_image(record, job.report)
        return made

    async def _collect_quietly(self) -> None:
        try:
            with anyio.CancelScope(shield=True):
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
        name = given_name(request.name) if request.name else name_of_reference(reference)

        async def work(job: Job[ImageView]) -> ImageView:
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
        chosen = given_name(request.name) if request.name else None
        packages = tuple(request.packages)

        async def work(job: Job[ImageView]) -> ImageView:
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
        checked, where = given_name(name), path.absolute()

        async def work(job: Job[ImageView]) -> ImageView:
            return await self._importer.import_path(job, where, checked, str(where))

        return self._watch(("path", where, checked), work)

    def import_archive(self, name: str, archive: AsyncIterator[bytes]) -> AsyncIterator[ImageEvent]:
        """Import an archive as it streams in; see `import_path` for what it may be.

        Raises:
            As `import_path`.
        """
        checked = given_name(name)

        async def work(job: Job[ImageView], upload: Path, digest: str) -> ImageView:
            async def imported(job: Job[ImageView]) -> ImageView:
                source = f"archive {digest}"
                return await self._importer.import_upload(job, upload, checked, source)

            return await self._imported(imported, job)

        def key(digest: str) -> Hashable:
            return ("archive", digest, checked)

        return self._uploads.watch(archive, key, work, _image_ready)

    def publish_layer(
        self, kind: LayerKind, name: str, description: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[LayerEvent]:
        """Publish a workspace or toolkit from a tar as it streams in.

        Raises:
            InvalidRequest: the name is wrong, or it is no tar.
            Conflict: the version exists with another content.
            StorageFull: no room.
        """
        split_version(name)

        async def work(job: Job[LayerView], upload: Path, _digest: str) -> LayerView:
            try:
                return await self.publications.publish(job, kind, name, description, upload)
            finally:
                await self._collect_quietly()

        def key(digest: str) -> Hashable:
            return ("layer", kind, name, digest)

        return self._uploads.watch(archive, key, work, lambda made: LayerReady(layer=made))

    async def list_layers(self, kind: LayerKind | None) -> list[LayerView]:
        """Workspaces and toolkits, by name; the store's included, if it answers."""
        return await self.publications.list(kind)

    async def layer(self, kind: LayerKind, name: str) -> LayerView:
        """One of them; without a version, the one published last. Raises NotFound."""
        return self.publications.view(await self.publications.find(kind, name))

    async def remove_layer(self, kind: LayerKind, name: str) -> None:
        """Forget a version, and remove its layer if nothing else means it.

        Raises:
            InvalidRequest: no version is named. NotFound: there is none.
            Conflict: a sandbox uses it.
        """
        await self.publications.remove(kind, name)
        await self.collect()

    async def push(self, name: str) -> AsyncGenerator[ImageEvent, None]:
        """Put an image into the shared store; progress, then `ImageReady`.

        Raises:
            NotFound: (kind image) there is none.
            Unsupported: this node shares no store.
            Unavailable: the store does not answer.
        """
        sharing, record = self._shared_store(), await self.resolve(name)

        async def work(job: Job[ImageView]) -> ImageView:
            await sharing.publish_image(record, job.report)
            return view(record)

        key = ("push", record.name, record.digest)
        watched = self._jobs.watch(key, work, _image_ready)
        async with contextlib.aclosing(watched) as events:
            async for event in events:
                yield event

    def _shared_store(self) -> Sharing:
        if self._sharing is None:
            raise Unsupported("this node shares no store; start the server with one: --store URL")
        return self._sharing

    async def list_images(self) -> list[ImageView]:
        """All images but snapshots, by name; the store's included, if it answers."""
        found = {} if self._sharing is None else await self._in_store(self._sharing)
        here = (record for record in self._images.records() if record.snapshot is None)
        found |= {record.name: record for record in here}
        return [view(record) for _, record in sorted(found.items())]

    @staticmethod
    async def _in_store(sharing: Sharing) -> dict[str, ImageRecord]:
        images = await sharing.names.all("image", lambda name: not is_snapshot(name))
        return {record.name: record for record in images}

    async def lint(self, request: LintRequest) -> LintReport:
        """Look an environment over; see `Inspection.lint`."""
        return await self._inspection.lint(request)

    async def trace(self, environment: EnvironmentRef, trace: str) -> TraceView:
        """What a run read of an environment; see `Inspection.trace`."""
        return await self._inspection.trace(environment, trace)

    # -- the store ----------------------------------------------------------------------------

    async def store(self) -> StoreView:
        """The shared store and this node's part of it."""
        return await view_store(self._shared.node, self._shared.store, self._shared.filler)

    async def collect_store(self, *, dry_run: bool) -> CollectReport:
        """Remove from the store what no name and no node needs.

        Raises:
            Unsupported: this node shares no store.
            Conflict: somebody publishes or collects now.
        """
        return await collect(self._shared_store().store, self._clock, dry_run=dry_run)


def _debian_names(planned: debian.Plan) -> list[ImageName]:
    by_suite = image_name(f"debian:{planned.suite}")
    return [image_name("debian"), by_suite] if planned.is_own_suite else [by_suite]


def mounted_by(record: ImageRecord) -> list[str]:
    """What is mounted for an image, bottom first."""
    return record.mounts or record.layers


def _image_ready(made: ImageView) -> ImageReady:
    return ImageReady(image=made)
