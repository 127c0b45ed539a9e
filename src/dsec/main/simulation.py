"""What `--backend sim` is made of: sandboxes in memory, images that are names only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from typing_extensions import override

from dsec.base.clock import Clock
from dsec.base.errors import NotFound, Unsupported
from dsec.edge.images import Packing
from dsec.edge.network.policy import Service
from dsec.edge.sim import SimBackend
from dsec.images.names import ImageName, image_name, name_of_reference
from dsec.images.records import (
    DirectoryMark,
    Environment,
    ImageConfig,
    ImageRecord,
    digest_of,
    view,
)
from dsec.wire.edge_v1 import ImageEvent, LayerEvent
from dsec.wire.public_v1 import (
    BuildImage,
    CollectReport,
    EnvironmentRef,
    ImageProgress,
    ImageReady,
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

__all__ = ["SERVICES", "SimBackend", "SimImages", "StandIn"]

SERVICES = {
    name: Service(name=name, keys=(f"tcp://{name}.simulated.invalid:443",), source="simulated")
    for name in ("crates", "debian", "go", "npm", "pypi")
}


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

    @property
    def environments(self) -> SimImages:
        """What sandboxes stand on: names."""
        return self

    async def compose(self, wanted: EnvironmentRef) -> Environment:
        """Resolve the image; workspaces and toolkits are taken at their word. Raises NotFound."""
        image = await self.resolve(wanted.image)
        return Environment(
            image=view(image), workspace=wanted.workspace or "", toolkits=list(wanted.toolkits)
        )

    async def hold(self, environment: Environment, owner: str, *, trace: str = "") -> None:
        """Nothing to fetch."""
        del environment, owner, trace

    async def mount(
        self, environment: Environment, sandbox: str, *, trace: str = "", record: bool = False
    ) -> list[Path]:
        """Nothing to mount."""
        del environment, sandbox, trace, record
        return []

    async def mends(self, environment: Environment, mounted: Sequence[Path]) -> list[DirectoryMark]:
        """No directories."""
        del environment, mounted
        return []

    async def release(self, sandbox: str) -> None:
        """Nothing to give up."""

    def rebuild_pins(self, pins: Iterable[tuple[str, Iterable[str]]]) -> None:
        """No layers, no pins."""

    def settled(self) -> None:
        """Nothing to tidy."""

    def failed_since(self, environment: Environment, sandbox: str, since: float) -> bool:
        """Nothing to fail."""
        del environment, sandbox, since
        return False

    def faults(self, environment: Environment, sandbox: str) -> list[Fault]:
        """Nothing to fail."""
        del environment, sandbox
        return []

    @property
    def snapshots(self) -> SimSnapshots:
        """None: simulated files are not on a disk."""
        return SimSnapshots()

    async def collect(self) -> list[str]:
        """No layers."""
        return []

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

    async def list_images(self) -> list[ImageView]:
        """All images, by name."""
        return [view(self._records[name]) for name in sorted(self._records)]

    def push(self, name: str) -> AsyncIterator[ImageEvent]:
        """Refused: there is nothing to share."""
        raise _unsimulated(f"pushing {name}")

    async def list_layers(self, kind: LayerKind | None) -> list[LayerView]:
        """None."""
        del kind
        return []

    async def layer(self, kind: LayerKind, name: str) -> LayerView:
        """None. Raises NotFound."""
        raise NotFound(f"no {kind} {name!r}", kind=kind)

    async def remove_layer(self, kind: LayerKind, name: str) -> None:
        """None. Raises NotFound."""
        raise NotFound(f"no {kind} {name!r}", kind=kind)

    def publish_layer(
        self, kind: LayerKind, name: str, description: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[LayerEvent]:
        """Refused: there are no layers."""
        del description, archive
        raise _unsimulated(f"publishing {kind} {name}")

    async def lint(self, request: LintRequest) -> LintReport:
        """Refused: there are no files."""
        raise _unsimulated(f"linting {request.image}")

    async def trace(self, environment: EnvironmentRef, trace: str) -> TraceView:
        """None. Raises NotFound."""
        raise NotFound(f"no trace {trace!r} of {environment.image}", kind="trace")

    async def store(self) -> StoreView:
        """No store."""
        return StoreView(node="")

    async def collect_store(self, *, dry_run: bool) -> CollectReport:
        """Refused: there is no store."""
        raise _unsimulated(f"collecting a store (dry run: {dry_run})")


class SimSnapshots:
    """No snapshots, and none can be taken."""

    def packing(
        self, writable: Path, environment: Environment, wanted: Pack
    ) -> AbstractAsyncContextManager[Packing]:
        """Refused: there is no directory to pack."""
        del writable, environment
        raise _unsimulated(f"packing {wanted.name}")

    async def diff(self, writable: Path, environment: Environment) -> list[DiffEntry]:
        """Refused: there is no directory to compare."""
        del writable, environment
        raise _unsimulated("comparing")

    async def get(self, project: str, name: str) -> SnapshotView:
        """None. Raises NotFound."""
        raise NotFound(f"no snapshot {name!r} in project {project}", kind="snapshot")

    async def by_image(self, image: str) -> SnapshotView | None:
        """None."""
        del image
        return None

    async def remove(self, project: str, name: str) -> None:
        """None. Raises NotFound."""
        await self.get(project, name)

    async def changes(self, project: str, name: str) -> list[DiffEntry]:
        """None. Raises NotFound."""
        await self.get(project, name)
        return []

    async def list(self, project: str) -> list[SnapshotView]:
        """None."""
        del project
        return []


def _unsimulated(what: str) -> Unsupported:
    return Unsupported(f"{what} is not simulated; start the server with --backend container")
