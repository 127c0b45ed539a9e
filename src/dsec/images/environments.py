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
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import anyio
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
from dsec.images.collecting import Uses
from dsec.images.compose import plan_layers
from dsec.images.devices import Devices
from dsec.images.faults import Faults
from dsec.images.layers import LayerStore
from dsec.images.names import image_name
from dsec.images.publications import Publications
from dsec.images.recorder import Recorder
from dsec.images.records import Environment, EnvironmentPart, ImageRecord, view
from dsec.images.sharing import Sharing
from dsec.images.shelf import Shelf
from dsec.images.traces import Traces
from dsec.kit.blocking import in_thread
from dsec.kit.together import together
from dsec.wire.public_v1 import EnvironmentRef
from dsec.wire.sandbox import Fault

logger = logging.getLogger("dsec.images.environments")


class Environments:
    """The environments of a node's sandboxes."""

    def __init__(  # noqa: PLR0913 - the parts it ties together
        self,
        images: Shelf[ImageRecord],
        publications: Publications,
        layers: LayerStore,
        devices: Devices,
        recorder: Recorder,
        traces: Traces,
        *,
        sharing: Sharing | None,
        uses: Uses | None,
        faults: Faults,
        tasks: TaskGroup,
        clock: Clock,
    ) -> None:
        self._images = images
        self._publications = publications
        self._layers = layers
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

    # -- names --------------------------------------------------------------------------------

    async def image(self, name: str) -> ImageRecord:
        """The image of a name, from the store if it is not here.

        Raises:
            InvalidRequest: it is no name.
            NotFound: (kind image) it is neither here nor in the store.
            Unavailable: it is not here, and the store does not answer.
        """
        if found := self._images.find(name):
            return found
        if self._sharing is None:
            raise self._images.missing(name)
        try:
            record = await self._sharing.find_image(image_name(name))
        except NotFound:
            raise self._images.missing(name) from None
        await in_thread("disk", self._images.put, record)
        return record

    async def compose(self, wanted: EnvironmentRef) -> Environment:
        """Resolve the names of an environment to what they mean now.

        Raises:
            InvalidRequest: one is no name.
            NotFound: (kind image, workspace, toolkit) one is neither here nor in the store.
            Unavailable: one is not here, and the store does not answer.
        """
        image = await self.image(wanted.image)
        parts = [EnvironmentPart(label="image", layers=image.mounts or image.layers)]
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
            self._layers.pins.unpin(owner)
            raise

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
        lazy = await in_thread("disk", self._any_lazy, wanted)
        known = await self._traces.best(environment, trace) if lazy else None
        if known is not None:
            self._tasks.start_soon(self._recorder.prefetch, known)
        if record or (lazy and known is None and self._recorder.claim(environment, trace)):
            return await self._recorder.mount(environment, wanted, sandbox, trace)
        await together(partial(self._mount_one, digest) for digest in wanted)
        return [self._layers.mount_point(digest) for digest in wanted]

    async def _fetch(self, sharing: Sharing, wanted: Sequence[str], sandbox: str) -> None:
        works = [partial(sharing.fetch_layers, wanted, sandbox)]
        if self._uses is not None:
            works.append(partial(self._uses.declare, wanted))
        await together(works)

    def _any_lazy(self, wanted: Sequence[str]) -> bool:
        devices = {device for digest in wanted for device in self._layers.get(digest).devices}
        return any(self._devices.is_lazy(device) for device in devices)

    async def _mount_one(self, digest: str) -> None:
        if self._layers.mounted(digest):
            return
        record = await in_thread("disk", self._layers.get, digest)
        paths = await self._devices.paths(record.devices)
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
        """A sandbox needs its layers no more. They stay mounted until `unmount_unused`."""
        self._layers.pins.unpin(sandbox)
        self._stranded.pop(sandbox, None)
        await self._recorder.release(sandbox)

    def rebuild_pins(self, pins: Iterable[tuple[str, Iterable[str]]]) -> None:
        """After a restart: which sandbox uses which layers (digests, any order)."""
        for sandbox, digests in pins:
            layers = list(digests)
            self._layers.pins.pin(layers, sandbox)
            if self._dead.intersection(layers):
                self._stranded[sandbox] = self._lost_fault()

    async def filler_lost(self) -> None:
        """The filler is another one: what is mounted over the data of the last one is dead.

        New sandboxes get new mounts. Those that stand on the old ones read EIO wherever the page
        cache has nothing, for good; they are told so.
        """
        lost = await in_thread("disk", self._lazily_mounted)
        for digest in lost:
            self._dead.add(digest)
            for owner in self._layers.pins.by(digest):
                self._stranded[owner] = self._lost_fault()
            await in_thread("mount", self._layers.abandon, digest)
        self._devices.forget()
        if lost:
            logger.error("the filler was lost", extra={"layers": len(lost)})

    def _lazily_mounted(self) -> list[str]:
        return [d for d in self._layers.mounted_digests() if self._any_lazy([d])]

    def _lost_fault(self) -> Fault:
        return Fault(
            code=DataUnavailable.code,
            message="the process that loaded its data was lost with what it held; what has not "
            "been read yet stays unreadable: replace the sandbox",
            since=self._clock.now(),
        )

    async def unmount_unused(self) -> list[str]:
        """Unmount the layers no sandbox uses; their digests."""
        gone = await in_thread("mount", self._layers.unmount_unused)
        mounted = self._layers.mounted_digests()
        needed = await in_thread("disk", self._devices_of, mounted)
        with contextlib.suppress(DsecError):
            await self._devices.close_unused(needed | self._recorder.devices)
            if self._uses is not None:
                await self._uses.withdraw(mounted)
        return gone

    def faults(self, environment: Environment, sandbox: str) -> list[Fault]:
        """What keeps a sandbox on an environment from working as it should, now."""
        if sandbox in self._stranded:
            return [self._stranded[sandbox]]
        if self._faults.none:
            return []
        return self._faults.among(self._devices_of(environment.layers))

    def _devices_of(self, digests: Iterable[str]) -> set[str]:
        return {device for digest in digests for device in self._layers.get(digest).devices}
