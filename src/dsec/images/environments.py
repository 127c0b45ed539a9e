"""What a sandbox stands on: names resolved, layers mounted once per host, reads recorded.

environment = await environments.compose(EnvironmentRef(image="debian", toolkits=["lint:v2"]))
layers = await environments.mount(environment, sandbox)      # topmost first
...
await environments.release(sandbox)
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup

from dsec.base.clock import Clock
from dsec.base.errors import (
    DataUnavailable,
    DsecError,
    InternalError,
    NotFound,
    Unavailable,
    Unsupported,
)
from dsec.images.compose import plan_layers
from dsec.images.data import DataStore
from dsec.images.devices import Devices
from dsec.images.faults import Faults
from dsec.images.layers import LayerStore
from dsec.images.mends import find_mends
from dsec.images.names import image_name
from dsec.images.publications import Publications
from dsec.images.recorder import Recorder
from dsec.images.records import (
    DirectoryMark,
    Environment,
    EnvironmentPart,
    ImageRecord,
    view,
)
from dsec.images.sharing import Sharing
from dsec.images.shelf import Shelf
from dsec.images.traces import Traces
from dsec.images.uses import Uses
from dsec.kit.blocking import in_thread
from dsec.kit.together import survive, together
from dsec.wire.public_v1 import EnvironmentRef
from dsec.wire.sandbox import Fault

logger = logging.getLogger("dsec.images.environments")

IDLE_MOUNT_S = 600.0
"""A layer nobody uses stays mounted so long, its page cache with it."""


def parts_of(image: ImageRecord) -> list[EnvironmentPart]:
    """What an image brings to an environment, bottom first; a snapshot has several parts."""
    if image.snapshot is not None:
        return list(image.snapshot.parts)
    return [EnvironmentPart(label="image", layers=image.mounts or image.layers)]


class Environments:
    """The environments of a node's sandboxes."""

    def __init__(  # noqa: PLR0913 - the parts it ties together
        self,
        images: Shelf[ImageRecord],
        publications: Publications,
        layers: LayerStore,
        data: DataStore,
        devices: Devices,
        recorder: Recorder,
        traces: Traces,
        *,
        run_dir: Path,
        sharing: Sharing | None,
        uses: Uses | None,
        faults: Faults,
        tasks: TaskGroup,
        clock: Clock,
    ) -> None:
        self._images = images
        self._publications = publications
        self._layers = layers
        self._data = data
        self._devices = devices
        self._recorder = recorder
        self._traces = traces
        self._sharing = sharing
        self._uses = uses
        self._faults = faults
        self._tasks = tasks
        self._clock = clock
        self._dead: set[str] = set()
        """Layers whose mounts died with a filler."""
        self._stranded: dict[str, Fault] = {}
        """Sandboxes that stand on such mounts."""
        self._idle_since: dict[str, float] = {}
        """Mounted layers nobody pins, and since when."""
        self._file = run_dir.absolute() / "stranded.json"
        self._settled = False
        """Whether it is known what the sandboxes of earlier runs stand on."""

    # -- names --------------------------------------------------------------------------------

    async def image(self, name: str) -> ImageRecord:
        """The image of a name, from the store if it is not here.

        Raises:
            InvalidRequest: it is no name.
            NotFound: (kind image) it is neither here nor in the store.
            Unavailable: it is not here, and the store does not answer.
        """
        found = self._images.find(name)
        if found is not None and (self._sharing is None or not found.is_contested):
            return found
        if self._sharing is None:
            raise self._images.missing(name)
        try:
            return await self._sharing.names.image(image_name(name))
        except NotFound:
            if found is not None:
                return found
            raise self._images.missing(name) from None

    async def compose(self, wanted: EnvironmentRef) -> Environment:
        """Resolve the names of an environment to what they mean now.

        Raises:
            InvalidRequest: one is no name.
            NotFound: (kind image, workspace, toolkit) one is neither here nor in the store.
            Unavailable: one is not here, and the store does not answer.
        """
        image = await self.image(wanted.image)
        parts = parts_of(image)
        workspace, toolkits = "", []
        if wanted.workspace is not None:
            named = await self._publications.find("workspace", wanted.workspace)
            workspace = named.name
            parts.append(EnvironmentPart(label=f"workspace {named.name}", layers=[named.digest]))
        for name in wanted.toolkits:
            named = await self._publications.find("toolkit", name)
            toolkits.append(named.name)
            parts.append(EnvironmentPart(label=f"toolkit {named.name}", layers=[named.digest]))
        return Environment(image=view(image), workspace=workspace, toolkits=toolkits, parts=parts)

    # -- mounts -------------------------------------------------------------------------------

    async def mount(
        self, environment: Environment, sandbox: str, *, trace: str = "", record: bool = False
    ) -> list[Path]:
        """Mount what a sandbox stands on, each layer once per host, and pin it.

        With a trace, what it tells of is fetched ahead. Without one, the first sandbox whose data
        is fetched on demand gets mounts of its own, through which its reads are recorded.

        Args:
            environment: composed before.
            sandbox: who pins.
            trace: name of the trace to use and, if there is none, to record.
            record: record in any case.

        Returns:
            The mounted directories, topmost first, as overlayfs has it.

        Raises:
            NotFound: (kind layer) one has been removed meanwhile.
            Unavailable: the store or the filler does not answer.
            Unsupported: the file system cannot carry layers, or recording is asked for without a
                filler.
            InternalError: the kernel refused.
        """
        wanted = plan_layers(environment.layers)
        self._layers.pins.pin(wanted, sandbox)
        try:
            if not record and (known := self._mounted(wanted)):
                return known
            return await self._mount(environment, wanted, sandbox, trace, record=record)
        except OSError as error:
            await self.release(sandbox)
            raise self._failure(environment, error) from error
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.release(sandbox)
            raise

    async def mends(self, environment: Environment, mounted: Sequence[Path]) -> list[DirectoryMark]:
        """Directories that a sandbox's root must be given back as they are below.

        A workspace or toolkit need not list the directories its files are in; those must stay what
        they are, and overlayfs has them from the topmost layer.

        Args:
            environment: composed before.
            mounted: what `mount` returned for it.

        Returns:
            What they shall be, ids as layers have them, parents first; seldom any.

        Raises:
            NotFound: (kind layer) a layer has been removed meanwhile.
            InternalError: a layer cannot be read.
        """
        wanted = plan_layers(environment.layers)
        implied = [self._layers.get(digest).implied for digest in wanted]
        if not any(implied[:-1]):
            return []
        try:
            return await in_thread("mount", find_mends, mounted, implied)
        except OSError as error:
            raise self._failure(environment, error) from error

    async def hold(self, environment: Environment, owner: str, *, trace: str = "") -> None:
        """Have its metadata here and its trace known, and pin its layers until `release`.

        After that, mounting asks the store for nothing. Raises as `mount`; then nothing is pinned.
        """
        wanted = plan_layers(environment.layers)
        self._layers.pins.pin(wanted, owner)
        if self._sharing is None or self._mounted(wanted):
            return
        try:
            await together(
                (
                    partial(self._fetch, self._sharing, wanted, owner),
                    partial(self._traces.best, environment, trace),
                )
            )
        except BaseException:
            self._unpin(owner)
            raise

    async def mount_layers(self, digests: Sequence[str], owner: str) -> list[Path]:
        """Mount layers to look at them, and pin them until `release`.

        Args:
            digests: bottom first.
            owner: who pins.

        Returns:
            The mounted directories, topmost first, each once.

        Raises:
            As `mount`; what was pinned stays so.
        """
        wanted = plan_layers(digests)
        self._layers.pins.pin(wanted, owner)
        if self._sharing is not None:
            await self._fetch(self._sharing, wanted, owner)
        try:
            await together(partial(self._mount_one, digest) for digest in wanted)
        except OSError as error:
            raise InternalError(f"cannot mount layers: {error}") from error
        return [self._layers.mount_point(digest) for digest in wanted]

    def _unpin(self, owner: str) -> None:
        self._layers.pins.unpin(owner)
        self._data.pins.unpin(owner)

    def _mounted(self, wanted: Sequence[str]) -> list[Path] | None:
        found = [path for digest in wanted if (path := self._layers.mounted(digest))]
        return found if len(found) == len(wanted) else None

    async def _mount(
        self,
        environment: Environment,
        wanted: Sequence[str],
        sandbox: str,
        trace: str,
        *,
        record: bool,
    ) -> list[Path]:
        if self._sharing is not None:
            await self._fetch(self._sharing, wanted, sandbox)
        lazy = self._any_lazy(wanted)
        known = await self._traces.best(environment, trace) if lazy else None
        if known is not None:
            prefetch = partial(self._recorder.prefetch, known)
            self._tasks.start_soon(survive, prefetch, "fetching ahead")
        if record or (lazy and known is None and self._recorder.claim(environment, trace)):
            return await self._recorder.mount(environment, wanted, sandbox, trace)
        await together(partial(self._mount_one, digest) for digest in wanted)
        return [self._layers.mount_point(digest) for digest in wanted]

    async def _fetch(self, sharing: Sharing, wanted: Sequence[str], owner: str) -> None:
        """Declared first, then fetched: a collector sees the one or has not begun to remove."""
        elsewhere = [digest for digest in wanted if not self._is_whole(digest)]
        if elsewhere and self._uses is not None:
            fresh = await self._uses.declare(elsewhere)
            await sharing.still_there(digest for digest in fresh if self._layers.has(digest))
        await sharing.fetch_layers(wanted, owner)

    def _is_whole(self, digest: str) -> bool:
        """Whether a layer and all its data are on this disk. Some calls of stat."""
        if not self._layers.has(digest):
            return False
        return all(self._data.raw(device) for device in self._layers.get(digest).devices)

    def _any_lazy(self, wanted: Sequence[str]) -> bool:
        devices = {device for digest in wanted for device in self._layers.get(digest).devices}
        return any(self._devices.is_lazy(device) for device in devices)

    async def _mount_one(self, digest: str) -> None:
        if self._layers.mounted(digest):
            return
        record = await in_thread("disk", self._layers.get, digest)
        async with self._devices.ready(record.devices) as paths:
            await in_thread("mount", self._layers.mount, digest, paths)

    def _failure(self, environment: Environment, error: OSError) -> DsecError:
        if error.errno == errno.ENOTBLK:  # what EROFS says of a file it cannot read by itself
            return Unsupported(
                f"the file system of {self._layers.root} cannot carry images; keep the state "
                "directory on ext4, xfs or btrfs"
            )
        if error.errno == errno.EIO:
            return Unavailable(f"image {environment.image.name!r} cannot be read: {error}")
        return InternalError(f"cannot mount image {environment.image.name!r}: {error}")

    async def release(self, sandbox: str) -> None:
        """A sandbox needs its layers no more. They stay mounted for a while, for the next one."""
        self._unpin(sandbox)
        self._stranded.pop(sandbox, None)
        await self._recorder.release(sandbox)

    # -- over time ----------------------------------------------------------------------------

    def rebuild_pins(self, pins: Iterable[tuple[str, Iterable[str]]]) -> None:
        """After a restart: which sandbox uses which layers (digests, any order)."""
        for sandbox, digests in pins:
            layers = list(digests)
            is_new = not self._layers.pins.of(sandbox)  # to this edge: it was here before
            self._layers.pins.pin(layers, sandbox)
            if is_new and self._dead.intersection(layers):
                self._stranded[sandbox] = self._lost_fault()

    def open(self) -> None:
        """Learn which sandboxes were stranded before this edge. Blocking."""
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            self._stranded = msgspec.json.decode(self._file.read_bytes(), type=dict[str, Fault])

    def _write_stranded(self) -> None:
        """In the run directory: it means nothing after a boot."""
        part = self._file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self._stranded))
        part.replace(self._file)

    def settled(self) -> None:
        """All sandboxes of earlier runs are known by now: what nobody pins may go."""
        self._settled = True

    async def tidy(self) -> None:
        """Unmount what has been unused for a while, close its devices, say what is still used.

        Raises:
            Unavailable: store or filler do not answer; the next time does it.
        """
        if self._settled:
            await self._unmount(self._long_idle())

    async def unmount_unused(self) -> list[str]:
        """Unmount the layers no sandbox uses; their digests."""
        return await self._unmount(None)

    async def _unmount(self, among: Collection[str] | None) -> list[str]:
        gone = await in_thread("mount", self._layers.unmount_unused, among)
        await self._devices.close_unused(self._needed_devices)
        if self._uses is not None and self._settled:
            in_use = {*self._layers.pins.all(), *self._layers.mounted_digests()}
            await self._uses.settle(d for d in in_use if not self._is_whole(d))
        return gone

    def _long_idle(self) -> set[str]:
        now, pinned = self._clock.monotonic(), self._layers.pins.all()
        idle = [d for d in self._layers.mounted_digests() if d not in pinned]
        self._idle_since = {d: self._idle_since.get(d, now) for d in idle}
        return {d for d, since in self._idle_since.items() if now - since >= IDLE_MOUNT_S}

    def failed_since(self, environment: Environment, sandbox: str, since: float) -> bool:
        """Whether data of a sandbox's environment could not be read at some time since then."""
        if sandbox in self._stranded:
            return True
        if self._faults.never:
            return False
        return self._faults.any_since(self._devices_of(environment.layers), since)

    def _needed_devices(self) -> set[str]:
        return self._devices_of(self._layers.mounted_digests()) | self._recorder.devices

    def _devices_of(self, digests: Iterable[str]) -> set[str]:
        found: set[str] = set()
        for digest in digests:
            with contextlib.suppress(NotFound):
                found.update(self._layers.get(digest).devices)
        return found

    async def filler_lost(self) -> None:
        """The filler is another one: what is mounted over the data of the last one is dead.

        New sandboxes get new mounts. Those that stand on the old ones read EIO wherever the page
        cache has nothing, for good; they are told so.
        """
        lost = await in_thread("disk", self._over_the_filler)
        mounted = self._layers.mounted_digests()
        self._dead.update(lost)
        for digest in lost:
            for owner in self._layers.pins.by(digest):
                self._stranded[owner] = self._lost_fault()
            if digest in mounted:
                await in_thread("mount", self._layers.abandon, digest)
        self._devices.forget()
        if self._stranded:
            logger.error("the filler was lost", extra={"sandboxes": len(self._stranded)})
            await in_thread("disk", self._write_stranded)

    def _over_the_filler(self) -> list[str]:
        """Layers that a mount of this node, shared or of one sandbox, has over the filler's files."""
        shown = self._devices.shown
        return [
            digest
            for digest in self._layers.digests()
            if self._any_lazy([digest]) or shown.intersection(self._devices_of([digest]))
        ]

    def _lost_fault(self) -> Fault:
        return Fault(
            code=DataUnavailable.code,
            message="the process that loaded its data was lost with what it held; what has not "
            "been read yet stays unreadable: replace the sandbox",
            since=self._clock.now(),
        )

    def faults(self, environment: Environment, sandbox: str) -> list[Fault]:
        """What keeps a sandbox on an environment from working as it should, now."""
        if sandbox in self._stranded:
            return [self._stranded[sandbox]]
        if self._faults.none:
            return []
        return self._faults.among(self._devices_of(environment.layers))
