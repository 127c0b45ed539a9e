"""Snapshots: what a sandbox wrote, as a layer, and an image made of it and all it lies over.

    async with images.snapshots.packing(writable, environment, wanted) as packing:
        await packing.look()                    # the sandbox runs
        await packing.take()                    # it stands still
        shown = await packing.keep(facts)       # it runs again

Once kept, a snapshot is on this node. With a store it is sent there in the background, however long
the store is away and whatever is restarted; from then on the store says whether there is one.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, DsecError, NotFound
from dsec.images.changes import list_changes
from dsec.images.environments import Environments
from dsec.images.erofs.read import read_image
from dsec.images.importer import Importer
from dsec.images.jobs import Job
from dsec.images.layers import LayerStore
from dsec.images.locks import KeyedLock
from dsec.images.names import ImageName, image_name, is_snapshot, snapshot_name
from dsec.images.oci.layer import Limits
from dsec.images.outgoing import Outgoing
from dsec.images.packing import Packing, alone, depth_of, split
from dsec.images.records import (
    Environment,
    EnvironmentPart,
    ImageConfig,
    ImageRecord,
    LayerRecord,
    SnapshotFacts,
    SnapshotRecord,
    digest_of,
)
from dsec.images.residue import Sieve
from dsec.images.sharing import Sharing
from dsec.images.shelf import Shelf
from dsec.images.store.several import several
from dsec.images.store_names import LISTING_S
from dsec.images.upper import Upper
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import ImageView
from dsec.wire.sandbox import DiffEntry, Pack, SnapshotView

logger = logging.getLogger("dsec.images.snapshots")

DIFF_LIMITS = Limits(entries=100_000, size_bytes=0)
"""Of a listing: nobody reads more."""


class KeptPacking(Packing):
    """One difference on its way; answers `dsec.edge.images.Packing`."""

    keeper: Snapshots

    async def keep(self, facts: SnapshotFacts) -> SnapshotView:
        """Put it into the store of layers, and record it under a name.

        Raises:
            InvalidRequest: project and name do not make a name.
            Conflict: the name is taken.
            StorageFull: no room; nothing of it is left.
        """
        return await self.keeper.keep(self, facts)


class Snapshots:
    """The snapshots of a node, those of the store included."""

    def __init__(  # noqa: PLR0913 - the parts it ties together
        self,
        images: Shelf[ImageRecord],
        importer: Importer,
        layers: LayerStore,
        environments: Environments,
        *,
        sharing: Sharing | None,
        limits: Limits,
        tasks: TaskGroup,
        clock: Clock,
        forget: Callable[[str], Awaitable[None]],
    ) -> None:
        """Join the node's parts; `forget` removes an image and what only it needed."""
        self._images = images
        self._importer = importer
        self._layers = layers
        self._environments = environments
        self._sharing = sharing
        self._limits = limits
        self._tasks = tasks
        self._clock = clock
        self._forget = forget
        self._naming = KeyedLock()
        self._outgoing = None if sharing is None else Outgoing(images, sharing, tasks, self._naming)

    def go_on(self) -> None:
        """Send what an earlier run could not."""
        if self._outgoing is not None:
            self._outgoing.go_on()

    # -- packing --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def packing(
        self, writable: Path, environment: Environment, wanted: Pack
    ) -> AsyncIterator[KeptPacking]:
        """Begin to pack an upper directory that lies over an environment.

        Raises:
            StorageFull: the body ran out of room.
        """
        async with self._importer.begin(Job()) as work:
            packing = KeptPacking(
                self._importer,
                self._layers,
                work,
                writable,
                environment,
                wanted,
                limits=self._limits,
                tasks=self._tasks,
                clock=self._clock,
            )
            packing.keeper = self
            try:
                yield packing
            finally:
                await packing.aclose()

    async def keep(self, packing: Packing, facts: SnapshotFacts) -> SnapshotView:
        """What `KeptPacking.keep` does."""
        name = snapshot_name(facts.project, facts.name)
        async with self._naming.holding(name):
            await self._check_free(name)
            layer = await packing.put(sync=True)
            parts = await packing.stacked(layer.digest)
            self._layers.pins.pin(_flat(parts), packing.work.owner)
            shown = self._shown(packing, facts, layer)
            record = await in_thread("disk", self._record, name, packing, parts, layer, shown)
            await in_thread("disk", self._images.put, record)
        if self._outgoing is not None:
            self._outgoing.add(record)
        return replace(shown)

    async def _check_free(self, name: ImageName) -> None:
        """Refuse a name that is taken, also in the store, if that answers. Raises Conflict."""
        if await self._local(name) is not None or await self._is_stored(name):
            raise Conflict(f"there is a snapshot {_short(name)} already", kind="snapshot")

    async def _is_stored(self, name: ImageName) -> bool:
        """Whether the store has it, as far as it says so soon."""
        if self._sharing is None:
            return False
        self._sharing.names.changed("image", name)
        with anyio.move_on_after(LISTING_S), contextlib.suppress(DsecError):
            await self._sharing.names.image(name)
            return True
        return False

    def _shown(self, packing: Packing, facts: SnapshotFacts, layer: LayerRecord) -> SnapshotView:
        return SnapshotView(
            name=facts.name,
            image=snapshot_name(facts.project, facts.name).removesuffix(":latest"),
            digest=layer.digest,
            parent=packing.environment.image.name,
            sandbox=facts.sandbox,
            step=facts.step,
            project=facts.project,
            packed_by=facts.packed_by,
            created_at=self._clock.now(),
            description=facts.description,
            cleaned=packing.wanted.clean and not facts.unclean,
            entries=layer.entries,
            size_bytes=layer.content_bytes,
            left_out=packing.left_out,
            frozen_ms=facts.frozen_ms,
            duration_ms=1000 * (self._clock.monotonic() - packing.began),
        )

    def _record(
        self,
        name: ImageName,
        packing: Packing,
        parts: Sequence[EnvironmentPart],
        layer: LayerRecord,
        shown: SnapshotView,
    ) -> ImageRecord:
        """The image. Of what is mounted as one, the single layers are named too if they are here."""
        environment = packing.environment
        below, differences = split(environment.parts)
        single = [d for digest in differences for d in alone(self._layers, digest)]
        layers = [d for digest in _flat(below) for d in alone(self._layers, digest)]
        layers += [*single, layer.digest]
        self._layers.pins.pin(layers, packing.work.owner)
        config = config_of(environment.image)
        shown.depth = depth_of(self._layers, environment.parts) + 1
        return ImageRecord(
            name=name,
            digest=digest_of(layers, config),
            layers=layers,
            mounts=_flat(parts),
            size_bytes=sum(self._layers.get(digest).content_bytes for digest in set(layers)),
            created_at=shown.created_at,
            source=f"sandbox {shown.sandbox}",
            config=config,
            snapshot=SnapshotRecord(
                shown=shown, parts=list(parts), differences=[*single, layer.digest]
            ),
        )

    # -- names ----------------------------------------------------------------------------------

    async def get(self, project: str, name: str) -> SnapshotView:
        """One of them.

        Raises:
            InvalidRequest: it is no name.
            NotFound: (kind snapshot) it is neither here nor in the store.
            Unavailable: it is not here, and the store does not answer.
        """
        return _snapshot_of(await self._find(snapshot_name(project, name))).shown

    async def by_image(self, image: str) -> SnapshotView | None:
        """The snapshot whose image name that is; None for any other image, and if there is none.

        Raises:
            InvalidRequest: it is no name.
            Unavailable: it is not here, and the store does not answer.
        """
        if not is_snapshot(image):
            return None
        with contextlib.suppress(NotFound):
            return _snapshot_of(await self._environments.image(image)).shown
        return None

    async def _find(self, name: ImageName) -> ImageRecord:
        found = await self._local(name)
        if (found is None or found.is_contested) and self._sharing is not None:
            with contextlib.suppress(NotFound):
                found = await self._sharing.names.image(name)
        if found is None:
            raise NotFound(f"there is no snapshot {_short(name)}", kind="snapshot", name=name)
        return found

    async def _local(self, name: ImageName) -> ImageRecord | None:
        """What this node has under a name; what was removed from the store by others goes here."""
        found = self._images.find(name)
        if found is None or self._sharing is None or not _snapshot_of(found).shown.stored:
            return found
        try:
            with anyio.move_on_after(LISTING_S):
                await self._sharing.names.image(name)
        except NotFound:
            await in_thread("disk", self._drop, name)
            return None
        except DsecError as error:
            logger.warning("the store was not asked", extra={"why": error.message})
        return found

    async def _drop_removed(self, names: Sequence[str]) -> None:
        """Forget those that the store says are no more, as far as it says so soon."""
        with anyio.move_on_after(LISTING_S):
            await several(partial(self._local, image_name(name)) for name in names)

    def _drop(self, name: ImageName) -> None:
        with contextlib.suppress(NotFound):
            self._images.remove(name)

    async def remove(self, project: str, name: str) -> None:
        """Forget one, here and in the store; its layers stay while something needs them.

        Raises:
            NotFound: (kind snapshot) there is none.
            Conflict: a sandbox was restored from it.
            Unavailable: it is gone here, and the store does not answer.
        """
        full = snapshot_name(project, name)
        await self._find(full)
        if self._outgoing is not None:
            self._outgoing.cancel(full)
        try:
            async with self._naming.holding(full):
                await self._forget(full)
        finally:
            self._send_still(full)

    def _send_still(self, name: ImageName) -> None:
        """Go on sending one that was not removed after all."""
        record = self._images.find(name)
        if self._outgoing is not None and record is not None:
            self._outgoing.add(record)

    # -- what they change -----------------------------------------------------------------------

    async def diff(self, writable: Path, environment: Environment) -> list[DiffEntry]:
        """What an upper directory changes, now.

        Raises:
            PayloadTooLarge: more than 100,000 entries.
            InvalidRequest: it cannot be read as a layer.
        """
        async with self._mounted(environment.layers) as lowers:
            return await in_thread("diff", _changes_of, writable, lowers)

    async def changes(self, project: str, name: str) -> list[DiffEntry]:
        """What one changes of what it was packed over.

        Raises:
            NotFound: (kind snapshot) there is none; (kind layer) what it was packed over is gone.
            Unavailable: the store does not answer.
        """
        snapshot = _snapshot_of(await self._find(snapshot_name(project, name)))
        *below, own = [*_flat(snapshot.parts[:-1]), *snapshot.differences]
        async with self._mounted([*below, own]) as mounted:
            return await in_thread("diff", self._stored_changes, own, mounted)

    def _stored_changes(self, own: str, mounted: Sequence[Path]) -> list[DiffEntry]:
        lowers = [path for path in mounted if path != self._layers.mount_point(own)]
        return list_changes(read_image(self._layers.meta(own)), lowers)

    @contextlib.asynccontextmanager
    async def _mounted(self, digests: Sequence[str]) -> AsyncIterator[list[Path]]:
        """Layers, mounted to be looked at; topmost first."""
        owner = f"import-look-{uuid.uuid4().hex}"  # no sandbox: nobody is told that it uses them
        try:
            yield await self._environments.mount_layers(digests, owner)
        finally:
            with anyio.CancelScope(shield=True):
                await self._environments.release(owner)

    async def list(self, project: str) -> list[SnapshotView]:
        """Those of a project, newest first; the store's included, as far as it answers.

        Of a name that the store has and one here could not have, both.

        Raises:
            InvalidRequest: it is no project's name.
        """
        prefix = snapshot_name(project, "x").removesuffix("x:latest")
        found: list[ImageRecord] = []
        if self._sharing is not None:
            found = await self._sharing.names.all("image", lambda n: n.startswith(prefix))
        stored = {record.name for record in found}
        here = [r for r in self._images.records() if r.name.startswith(prefix)]
        await self._drop_removed([r.name for r in here if r.name not in stored])
        here = [r for r in self._images.records() if r.name.startswith(prefix)]
        own = {record.name for record in here if not record.is_contested}
        found = [*here, *(record for record in found if record.name not in own)]
        views = [_snapshot_of(record).shown for record in found]
        mine = [view for view in views if view.project == project]
        return sorted(mine, key=lambda view: (-view.created_at, view.name))


def _changes_of(writable: Path, lowers: Sequence[Path]) -> list[DiffEntry]:
    with Upper(writable, Sieve(clean=False), DIFF_LIMITS) as upper:
        return list_changes(upper.read(still=False).tree, lowers)


def _flat(parts: Sequence[EnvironmentPart]) -> list[str]:
    return [digest for part in parts for digest in part.layers]


def _snapshot_of(record: ImageRecord) -> SnapshotRecord:
    """Names and records go together: nobody else may give such a name."""
    if record.snapshot is None:
        raise NotFound(f"image {record.name} is no snapshot", kind="snapshot")
    return record.snapshot


def _short(name: str) -> str:
    return repr(name.removesuffix(":latest").rpartition("/")[2])


def config_of(image: ImageView) -> ImageConfig:
    """How a command in an image begins."""
    return ImageConfig(
        env=image.env,
        workdir=image.workdir,
        user=image.user,
        entrypoint=image.entrypoint,
        cmd=image.cmd,
    )
