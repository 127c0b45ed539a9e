"""What the edge asks of the room that keeps images; `dsec.images.ImageService` answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Protocol

from dsec.images.records import ImageConfig, ImageRecord
from dsec.wire.edge_v1 import ImageEvent
from dsec.wire.public_v1 import BuildImage, ImageView, PullImage


class Images(Protocol):
    """The images of a node."""

    async def resolve(self, name: str) -> ImageRecord:
        """The image of a name. Raises InvalidRequest, NotFound."""
        ...

    async def mount(self, record: ImageRecord, sandbox: str) -> list[Path]:
        """Mount an image's layers for a sandbox; topmost first. Raises NotFound, InternalError."""
        ...

    async def release(self, sandbox: str) -> None:
        """Give up what was mounted for a sandbox. Idempotent; works after a restart."""
        ...

    def rebuild_pins(self, pins: Iterable[tuple[str, Iterable[str]]]) -> None:
        """After a restart: which sandbox uses which layers (digests)."""
        ...

    async def list(self) -> list[ImageView]:
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


def record_of(view: ImageView) -> ImageRecord:
    """The image a journaled sandbox was made from, even if its name means another one by now."""
    return ImageRecord(
        name=view.name,
        digest=view.digest,
        layers=view.layers,
        size_bytes=view.size_bytes,
        created_at=view.created_at,
        source=view.source,
        config=ImageConfig(
            env=view.env,
            workdir=view.workdir,
            user=view.user,
            entrypoint=view.entrypoint,
            cmd=view.cmd,
        ),
    )
