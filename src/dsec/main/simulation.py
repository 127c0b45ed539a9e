"""What `--backend sim` is made of: sandboxes in memory, images that are names only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from typing_extensions import override

from dsec.base.clock import Clock
from dsec.base.errors import NotFound
from dsec.edge.sim import SimBackend
from dsec.images.names import ImageName, image_name, name_of_reference
from dsec.images.records import ImageConfig, ImageRecord, digest_of, view
from dsec.wire.edge_v1 import ImageEvent
from dsec.wire.public_v1 import BuildImage, ImageProgress, ImageReady, ImageView, PullImage

__all__ = ["SimBackend", "SimImages", "StandIn"]


class StandIn(SimBackend):
    """Answers requests for containers too, so that programs run unchanged; views say what it is."""

    @property
    @override
    def name(self) -> str:
        """As in `SandboxSpec.backend`."""
        return "container"


class SimImages:
    """Images without bytes: `debian` is there, others can be pulled from nowhere."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[ImageName, ImageRecord] = {}
        self._add(image_name("debian"), "simulated")

    def _add(self, name: ImageName, source: str, size_bytes: int = 0) -> ImageReady:
        config = ImageConfig(env={"PATH": "/usr/local/bin:/usr/bin:/bin"})
        self._records[name] = ImageRecord(
            name=name,
            digest=digest_of([name], config),
            layers=[],
            size_bytes=size_bytes,
            created_at=self._clock.now(),
            source=source,
            config=config,
        )
        return ImageReady(image=view(self._records[name]))

    async def resolve(self, name: str) -> ImageRecord:
        """The image of a name. Raises InvalidRequest, NotFound."""
        try:
            return self._records[image_name(name)]
        except KeyError:
            raise NotFound(f"no image {name!r}; pull it first", kind="image") from None

    async def mount(self, record: ImageRecord, sandbox: str) -> list[Path]:
        """Nothing to mount."""
        del record, sandbox
        return []

    async def release(self, sandbox: str) -> None:
        """Nothing to give up."""

    def rebuild_pins(self, pins: Iterable[tuple[str, Iterable[str]]]) -> None:
        """No layers, no pins."""

    async def remove(self, name: str) -> None:
        """Forget one. Raises NotFound."""
        del self._records[image_name((await self.resolve(name)).name)]

    async def pull(self, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Pretend to import from a registry."""
        name = image_name(request.name) if request.name else name_of_reference(request.reference)
        yield ImageProgress(step="pretending")
        yield self._add(name, f"simulated {request.reference}")

    async def build(self, request: BuildImage) -> AsyncIterator[ImageEvent]:
        """Pretend to build a distribution image."""
        yield ImageProgress(step="pretending")
        yield self._add(image_name(request.name or request.distribution), "simulated")

    async def import_archive(
        self, name: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[ImageEvent]:
        """Read an archive and forget it."""
        size = 0
        async for chunk in archive:
            size += len(chunk)
        yield self._add(image_name(name), "simulated archive", size)

    async def list(self) -> list[ImageView]:
        """All images, by name."""
        return [view(self._records[name]) for name in sorted(self._records)]
