"""What the control plane and an edge say to each other beyond operations on one sandbox.

Those (`/v1/sandboxes/{id}/...`) are the same on both sides: the apiserver checks who asks and
passes the bytes through to the edge the id names, so their shapes are in `sandbox.py` alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from msgspec import Struct, field

from dsec.wire.public_v1 import (
    BuildImage,
    ImageProgress,
    ImageReady,
    ImageView,
    NodeView,
    PullImage,
)
from dsec.wire.sandbox import SandboxSpec, SandboxView


class CreateOnEdge(Struct, kw_only=True, forbid_unknown_fields=True):
    """Create under an id the control plane chose: sending it again returns the same sandbox."""

    id: str
    project: str
    spec: SandboxSpec


class ListFilter(Struct, kw_only=True, omit_defaults=True):
    """Which sandboxes to list; empty = all."""

    project: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)


ImageEvent = ImageProgress | ImageReady


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

    async def stop(self, sandbox: str) -> SandboxView:
        """Stop it and wait until nothing of it is left. Harmless twice. Raises NotFound."""
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
