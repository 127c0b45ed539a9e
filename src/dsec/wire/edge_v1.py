"""What the control plane and an edge say to each other beyond operations on one sandbox.

Those (`/v1/sandboxes/{id}/...`) are the same on both sides: the apiserver checks who asks and
passes the bytes through to the edge the id names, so their shapes are in `sandbox.py` alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from msgspec import Struct, field

from dsec.base.states import StopReason
from dsec.wire.public_v1 import (
    BuildImage,
    CollectReport,
    EnvironmentRef,
    ImageProgress,
    ImageReady,
    ImageView,
    LayerKind,
    LayerReady,
    LayerView,
    LintReport,
    LintRequest,
    NodeView,
    PullImage,
    StoreView,
    TraceView,
)
from dsec.wire.sandbox import DiffEntry, SandboxSpec, SandboxView, SnapshotView

PRINCIPAL_HEADER = "x-dsec-principal"
"""Who asks, on what the apiserver passes through; it lets no `X-Dsec-*` of a client's in."""
PROJECT_HEADER = "x-dsec-project"
"""The sandbox's project, on a reading of its trajectory: the one that was authorized."""


class CreateOnEdge(Struct, kw_only=True, forbid_unknown_fields=True):
    """Create under an id the control plane chose: sending it again returns the same sandbox."""

    id: str
    project: str
    spec: SandboxSpec
    principal: str = ""
    """Who asks: what was packed with residue is restored for the one who packed it alone."""


class StopOrder(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Why a sandbox is stopped, as its view will say."""

    reason: StopReason = StopReason.REQUESTED
    detail: str = ""


class PauseOrder(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a sandbox is paused."""

    held: str = ""
    """Why only an explicit resume may wake it; empty = whatever is asked of it next does. Of one that
    is paused already, too."""


ASKED = StopOrder()
PLAIN = PauseOrder()


class SentTrajectory(Struct, kw_only=True, frozen=True):
    """What the store says of a trajectory that was sent there. The edge that tells it checks it."""

    sandbox: str
    project: str


class ListFilter(Struct, kw_only=True, omit_defaults=True):
    """Which sandboxes to list; empty = all."""

    project: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    job: str = ""


ImageEvent = ImageProgress | ImageReady
LayerEvent = ImageProgress | LayerReady


class EdgeApi(Protocol):
    """An edge as the control plane sees it, in the same process or over HTTP."""

    async def describe(self) -> NodeView:
        """How the node is. Raises Unavailable."""
        ...

    async def create(self, request: CreateOnEdge) -> SandboxView:
        """Create a sandbox and wait until it runs.

        Raises:
            NotFound: no such image. Unsupported: a part of the request cannot be had here.
            CapacityUnavailable: refused before anything was started. StartFailed.
        """
        ...

    async def get(self, sandbox: str) -> SandboxView:
        """Look at one, ended ones included while they are remembered. Raises NotFound."""
        ...

    async def list_sandboxes(self, matching: ListFilter) -> list[SandboxView]:
        """Look at all that match, newest first."""
        ...

    async def stop(self, sandbox: str, order: StopOrder = ASKED) -> SandboxView:
        """Stop it and wait until nothing of it is left. Harmless twice. Raises NotFound."""
        ...

    async def pause(self, sandbox: str, order: PauseOrder = PLAIN) -> SandboxView:
        """Freeze it and take back its memory. Harmless twice. Raises NotFound, SandboxGone."""
        ...

    async def resume(self, sandbox: str) -> SandboxView:
        """Have it go on. Harmless twice. Raises NotFound, SandboxGone."""
        ...

    async def sent_trajectory(self, sandbox: str) -> SentTrajectory:
        """Of a sandbox that is over, of any node, as this one's store has it.

        Raises:
            NotFound: the store has none. Unavailable: it does not answer.
            DataUnavailable: what it says of it makes no sense.
        """
        ...

    async def snapshots(self, project: str) -> list[SnapshotView]:
        """Snapshots of a project that can be had here, the store's included; newest first."""
        ...

    async def remove_snapshot(self, project: str, name: str) -> None:
        """Forget a snapshot. Raises NotFound, Conflict while a sandbox stands on it."""
        ...

    async def snapshot_diff(self, project: str, name: str) -> list[DiffEntry]:
        """What a snapshot has changed, by path. Raises NotFound."""
        ...

    async def images(self) -> list[ImageView]:
        """Images on this node."""
        ...

    async def remove_image(self, name: str) -> None:
        """Forget an image. Raises NotFound, Conflict while a sandbox uses it."""
        ...

    def pull_image(self, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Import from a registry; progress, then `ImageReady`."""
        ...

    def build_image(self, request: BuildImage) -> AsyncIterator[ImageEvent]:
        """Build a distribution image; progress, then `ImageReady`."""
        ...

    def import_image(self, name: str, archive: AsyncIterator[bytes]) -> AsyncIterator[ImageEvent]:
        """Import an archive (OCI or Docker image, or a root file system) as it streams in."""
        ...

    # environments

    async def layers(self, kind: LayerKind | None = None) -> list[LayerView]:
        """Workspaces and toolkits that can be had here, the store's included."""
        ...

    async def layer(self, kind: LayerKind, name: str) -> LayerView:
        """One of them; without a version, the newest published. Raises NotFound."""
        ...

    async def remove_layer(self, kind: LayerKind, name: str) -> None:
        """Forget a version. Raises NotFound, Conflict while a sandbox uses it."""
        ...

    def publish_layer(
        self, kind: LayerKind, name: str, description: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[LayerEvent]:
        """Publish a version from a tar as it streams in; the same content again is harmless.

        Raises:
            Conflict: the version exists with another content.
        """
        ...

    def push_image(self, name: str) -> AsyncIterator[ImageEvent]:
        """Put an image into the shared store. Raises NotFound, Unsupported without a store."""
        ...

    async def lint(self, request: LintRequest) -> LintReport:
        """Look an environment over. Raises NotFound."""
        ...

    async def trace(self, environment: EnvironmentRef, trace: str) -> TraceView:
        """What a run read of an environment, as recorded. Raises NotFound."""
        ...

    async def store(self) -> StoreView:
        """The shared store and this node's part of it."""
        ...

    async def collect_store(self, *, dry_run: bool) -> CollectReport:
        """Remove from the store what nothing refers to. Raises Unsupported without a store."""
        ...
