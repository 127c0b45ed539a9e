"""What the edge asks of the room that keeps images; `dsec.images.ImageService` answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from dsec.images.records import DirectoryMark, Environment, SnapshotFacts
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
from dsec.wire.sandbox import DiffEntry, Fault, Pack, SnapshotView

__all__ = ["Environments", "Images", "Packing", "SnapshotFacts", "Snapshots"]


class Environments(Protocol):
    """What sandboxes stand on."""

    async def compose(self, wanted: EnvironmentRef) -> Environment:
        """Resolve its names. Raises InvalidRequest, NotFound, Unavailable."""
        ...

    async def hold(self, environment: Environment, owner: str, *, trace: str = "") -> None:
        """Have on the node what a mount needs, and keep it until `release`; may take long.

        Raises:
            NotFound: a layer has gone. Unavailable: the store does not answer.
        """
        ...

    async def mount(
        self, environment: Environment, sandbox: str, *, trace: str = "", record: bool = False
    ) -> list[Path]:
        """Mount what a sandbox stands on; topmost first.

        Raises:
            NotFound: a layer has gone. Unavailable: the store does not answer.
            Unsupported: this node cannot. InternalError: the kernel refused.
        """
        ...

    async def mends(self, environment: Environment, mounted: Sequence[Path]) -> list[DirectoryMark]:
        """Directories to be given back, in the sandbox's root, what they are below; seldom any.

        Raises:
            NotFound: a layer has gone. InternalError: one cannot be read.
        """
        ...

    async def release(self, sandbox: str) -> None:
        """Give up what was mounted for a sandbox. Idempotent; works after a restart."""
        ...

    def rebuild_pins(self, pins: Iterable[tuple[str, Iterable[str]]]) -> None:
        """After a restart: which sandbox uses which layers (digests)."""
        ...

    def settled(self) -> None:
        """All sandboxes of earlier runs have said what they use."""
        ...

    def failed_since(self, environment: Environment, sandbox: str, since: float) -> bool:
        """Whether data of its environment could not be read at some time since then."""
        ...

    def faults(self, environment: Environment, sandbox: str) -> list[Fault]:
        """What keeps a sandbox on it from working as it should, now."""
        ...


class Packing(Protocol):
    """One difference on its way into a layer. Steps in this order; left early, nothing remains."""

    async def look(self) -> None:
        """First pass, while the sandbox runs: read what will hardly change any more."""
        ...

    async def take(self) -> bool:
        """Second pass, while it stands still: what changed since, and what it has open to write.

        Returns:
            Whether it was done; if not, so much has come that `look` is due again, and then this.

        Raises:
            StorageFull: no room.
        """
        ...

    async def layer(self) -> str:
        """Put it into the node's store of layers; its digest. Kept while a sandbox holds it."""
        ...

    async def over(self, digest: str) -> Environment:
        """What a sandbox stands on that begins with that layer."""
        ...

    async def keep(self, facts: SnapshotFacts) -> SnapshotView:
        """Put it there, and record it under a name.

        Raises:
            Conflict: the name is taken.
        """
        ...


class Snapshots(Protocol):
    """Differences of sandboxes as layers, and images made of them."""

    def packing(
        self, writable: Path, environment: Environment, wanted: Pack
    ) -> AbstractAsyncContextManager[Packing]:
        """Begin to pack an upper directory that lies over an environment."""
        ...

    async def diff(self, writable: Path, environment: Environment) -> list[DiffEntry]:
        """What an upper directory changes, now."""
        ...

    async def get(self, project: str, name: str) -> SnapshotView:
        """One of them. Raises NotFound."""
        ...

    async def by_image(self, image: str) -> SnapshotView | None:
        """The snapshot whose image name that is; None for any other image."""
        ...

    async def changes(self, project: str, name: str) -> list[DiffEntry]:
        """What one changes. Raises NotFound."""
        ...

    async def list(self, project: str) -> list[SnapshotView]:
        """Those of a project, the store's included; newest first."""
        ...

    async def remove(self, project: str, name: str) -> None:
        """Forget one. Raises NotFound."""
        ...


class Images(Protocol):
    """The images of a node; as in `EdgeApi`, where the names are the same."""

    @property
    def environments(self) -> Environments:
        """What sandboxes stand on."""
        ...

    @property
    def snapshots(self) -> Snapshots:
        """Differences packed."""
        ...

    async def collect(self) -> list[str]:
        """Remove layers that no name means and no sandbox needs; their digests."""
        ...

    async def list_images(self) -> list[ImageView]:
        """All images."""
        ...

    async def remove(self, name: str) -> None:
        """Forget one. Raises NotFound, Conflict while a sandbox uses it."""
        ...

    def pull(self, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Import from a registry."""
        ...

    def build(self, request: BuildImage) -> AsyncIterator[ImageEvent]:
        """Build a distribution image."""
        ...

    def import_archive(self, name: str, archive: AsyncIterator[bytes]) -> AsyncIterator[ImageEvent]:
        """Import an archive as it streams in."""
        ...

    def push(self, name: str) -> AsyncIterator[ImageEvent]:
        """Put one into the store. Raises NotFound, Unsupported."""
        ...

    async def list_layers(self, kind: LayerKind | None) -> list[LayerView]:
        """Workspaces and toolkits."""
        ...

    async def layer(self, kind: LayerKind, name: str) -> LayerView:
        """One of them. Raises NotFound."""
        ...

    async def remove_layer(self, kind: LayerKind, name: str) -> None:
        """Forget a version. Raises NotFound, Conflict."""
        ...

    def publish_layer(
        self, kind: LayerKind, name: str, description: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[LayerEvent]:
        """Publish a version from a tar as it streams in."""
        ...

    async def lint(self, request: LintRequest) -> LintReport:
        """Look an environment over."""
        ...

    async def trace(self, environment: EnvironmentRef, trace: str) -> TraceView:
        """What a run read of an environment. Raises NotFound."""
        ...

    async def store(self) -> StoreView:
        """The shared store and this node's part of it."""
        ...

    async def collect_store(self, *, dry_run: bool) -> CollectReport:
        """Remove from the store what nothing refers to."""
        ...
