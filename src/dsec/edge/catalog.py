"""The edge's use cases about images and environments: those of the node, passed on to its `Images`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable

from dsec.base.errors import Conflict
from dsec.edge.images import Images
from dsec.edge.record import SandboxRecord
from dsec.images.names import image_name
from dsec.wire.edge_v1 import ImageEvent, LayerEvent
from dsec.wire.public_v1 import (
    BuildImage,
    CollectReport,
    EnvironmentRef,
    ImageView,
    LayerKind,
    LayerView,
    LintReport,
    LintRequest,
    PullImage,
    StoreView,
    TraceView,
)
from dsec.wire.sandbox import DiffEntry, SnapshotView


class Catalog(ABC):
    """What `EdgeService` says of images."""

    def __init__(self, images: Images) -> None:
        """Serve the node's images, opened by the caller."""
        self._images = images

    @abstractmethod
    def _users(self) -> Iterable[SandboxRecord]:
        """Sandboxes that are not over."""

    async def images(self) -> list[ImageView]:
        """Images on this node."""
        return await self._images.list_images()

    async def remove_image(self, name: str) -> None:
        """Forget an image. Raises NotFound, Conflict while a sandbox uses it."""
        full = image_name(name)
        waiting = [record.id for record in self._users() if image_name(record.image.name) == full]
        if waiting:
            raise Conflict(f"image {full} is used by {waiting[0]}", users=len(waiting))
        await self._images.remove(name)

    def pull_image(self, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Import from a registry; progress, then `ImageReady`."""
        return self._images.pull(request)

    def build_image(self, request: BuildImage) -> AsyncIterator[ImageEvent]:
        """Build a distribution image; progress, then `ImageReady`."""
        return self._images.build(request)

    def import_image(self, name: str, archive: AsyncIterator[bytes]) -> AsyncIterator[ImageEvent]:
        """Import an archive as it streams in."""
        return self._images.import_archive(name, archive)

    # snapshots

    async def snapshots(self, project: str) -> list[SnapshotView]:
        """Snapshots of a project that can be had here, the store's included; newest first."""
        return await self._images.snapshots.list(project)

    async def remove_snapshot(self, project: str, name: str) -> None:
        """Forget a snapshot. Raises NotFound, Conflict while a sandbox stands on it."""
        snapshot = await self._images.snapshots.get(project, name)
        full = image_name(snapshot.image)
        users = [record.id for record in self._users() if image_name(record.image.name) == full]
        if users:
            raise Conflict(f"snapshot {name} is used by {users[0]}", users=len(users))
        await self._images.snapshots.remove(project, name)

    async def snapshot_diff(self, project: str, name: str) -> list[DiffEntry]:
        """What a snapshot has changed, by path. Raises NotFound."""
        return await self._images.snapshots.changes(project, name)

    # environments

    async def layers(self, kind: LayerKind | None = None) -> list[LayerView]:
        """Workspaces and toolkits that can be had here."""
        return await self._images.list_layers(kind)

    async def layer(self, kind: LayerKind, name: str) -> LayerView:
        """One of them. Raises NotFound."""
        return await self._images.layer(kind, name)

    async def remove_layer(self, kind: LayerKind, name: str) -> None:
        """Forget a version. Raises NotFound, Conflict while a sandbox uses it."""
        await self._images.remove_layer(kind, name)

    def publish_layer(
        self, kind: LayerKind, name: str, description: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[LayerEvent]:
        """Publish a version from a tar as it streams in."""
        return self._images.publish_layer(kind, name, description, archive)

    def push_image(self, name: str) -> AsyncIterator[ImageEvent]:
        """Put an image into the shared store."""
        return self._images.push(name)

    async def lint(self, request: LintRequest) -> LintReport:
        """Look an environment over. Raises NotFound."""
        return await self._images.lint(request)

    async def trace(self, environment: EnvironmentRef, trace: str) -> TraceView:
        """What a run read of an environment, as recorded. Raises NotFound."""
        return await self._images.trace(environment, trace)

    async def store(self) -> StoreView:
        """The shared store and this node's part of it."""
        return await self._images.store()

    async def collect_store(self, *, dry_run: bool) -> CollectReport:
        """Remove from the store what nothing refers to."""
        return await self._images.collect_store(dry_run=dry_run)
