"""A simulated node whose sandboxes write into directories, and packs these into layers of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream
from msgspec.structs import replace
from typing_extensions import override

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import Conflict, NotFound
from dsec.edge.histories import TRAJECTORY
from dsec.edge.images import SnapshotFacts
from dsec.edge.record import SandboxRecord
from dsec.edge.sim import Faults, SimBackend, SimHost
from dsec.images.records import DIFFERENCE, Environment, EnvironmentPart
from dsec.wire.sandbox import DiffEntry, Pack, SnapshotView
from tests.unit.edge.node import FakeImages, Node, image

Files = dict[str, bytes]
Hook = Callable[[], Awaitable[None]]


async def nothing() -> None:
    pass


class PackableBackend(SimBackend):
    """Gives each sandbox an upper directory; tests write into it themselves."""

    def __init__(
        self, clock: Clock, host: SimHost, faults: Faults, environments: FakeImages
    ) -> None:
        super().__init__(clock, host=host, faults=faults)
        self._environments = environments
        self.frozen: set[str] = set()

    @override
    async def launch(self, record: SandboxRecord) -> None:
        await self._environments.mount(record.environment, record.id)
        await super().launch(record)
        self.upper(record.directory).mkdir(exist_ok=True)

    @override
    async def connect(self, record: SandboxRecord) -> ByteStream:
        self._environments.rebuild_pins([(record.id, record.environment.layers)])
        return await super().connect(record)

    @override
    async def clean(self, record: SandboxRecord) -> None:
        await super().clean(record)
        await self._environments.release(record.id)

    @staticmethod
    def upper(directory: str) -> Path:
        return Path(directory) / "upper"

    @override
    def writable(self, record: SandboxRecord) -> Path | None:
        return self.upper(record.directory)

    @override
    async def freeze(self, record: SandboxRecord) -> None:
        await super().freeze(record)
        self.frozen.add(record.id)

    @override
    async def thaw(self, record: SandboxRecord) -> None:
        await super().thaw(record)
        self.frozen.discard(record.id)


class FakePacking:
    """Keeps the files of a directory in memory."""

    def __init__(self, of: FakeSnapshots, writable: Path, base: Environment, wanted: Pack) -> None:
        self._of = of
        self._writable = writable
        self._base = base
        self._wanted = wanted
        self.files: Files = {}

    async def look(self) -> None:
        self._of.steps.append("look")
        await self._of.on_look()

    async def take(self) -> bool:
        self._of.steps.append("take")
        await self._of.on_take()
        self.files = read_files(self._writable)
        self._of.grown -= 1
        return self._of.grown < 0

    async def layer(self) -> str:
        self._of.steps.append("layer")
        await self._of.on_layer()
        digest = "sha256:" + hashlib.sha256(repr(sorted(self.files.items())).encode()).hexdigest()
        self._of.layers[digest] = self.files
        self._of.busy.add(digest)
        return digest

    async def over(self, digest: str) -> Environment:
        part = EnvironmentPart(label=DIFFERENCE, layers=[digest])
        return replace(self._base, parts=[*self._base.parts, part])

    async def keep(self, facts: SnapshotFacts) -> SnapshotView:
        digest = await self.layer()
        key = (facts.project, facts.name)
        if key in self._of.views:
            raise Conflict(f"there is a snapshot {facts.name}", kind="snapshot")
        name = f"snapshots/{facts.project}/{facts.name}"
        view = SnapshotView(
            name=facts.name,
            image=name,
            digest=digest,
            parent=self._base.image.name,
            sandbox=facts.sandbox,
            step=facts.step,
            project=facts.project,
            packed_by=facts.packed_by,
            description=facts.description,
            cleaned=self._wanted.clean and not facts.unclean,
            frozen_ms=facts.frozen_ms,
            entries=len(self.files),
        )
        self._of.views[key] = view
        self._of.images.records[name] = image(name)
        return view


class FakeSnapshots:
    """As `dsec.edge.images.Snapshots` has it."""

    def __init__(self, images: PackingImages) -> None:
        self.images = images
        self.views: dict[tuple[str, str], SnapshotView] = {}
        self.layers: dict[str, Files] = {}
        self.busy: set[str] = set()
        """Layers of packings under way."""
        self.steps: list[str] = []
        self.grown = 0
        """So often the second look says that the first one is due again."""
        self.open = 0
        self.most_open = 0
        self.on_look: Hook = nothing
        self.on_take: Hook = nothing
        self.on_layer: Hook = nothing

    @asynccontextmanager
    async def packing(
        self, writable: Path, environment: Environment, wanted: Pack
    ) -> AsyncIterator[FakePacking]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield FakePacking(self, writable, environment, wanted)
        finally:
            self.open -= 1
            self.busy.clear()

    async def diff(self, writable: Path, environment: Environment) -> list[DiffEntry]:
        del environment
        names = sorted(read_files(writable))
        return [DiffEntry(path=f"/{name}", change="added", kind="file") for name in names]

    async def get(self, project: str, name: str) -> SnapshotView:
        try:
            return self.views[project, name]
        except KeyError:
            raise NotFound(f"no snapshot {name}", kind="snapshot") from None

    async def by_image(self, image: str) -> SnapshotView | None:
        return next((view for view in self.views.values() if view.image == image), None)

    async def remove(self, project: str, name: str) -> None:
        await self.get(project, name)
        del self.views[project, name]

    async def changes(self, project: str, name: str) -> list[DiffEntry]:
        await self.get(project, name)
        return []

    async def list(self, project: str) -> list[SnapshotView]:
        return [view for (of, _), view in self.views.items() if of == project]


class PackingImages(FakeImages):
    """Images with snapshots; layers of forks go when nobody pins them."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeSnapshots(self)

    @property
    @override
    def snapshots(self) -> FakeSnapshots:  # type: ignore[override]
        return self.fake

    @override
    async def hold(self, environment: Environment, owner: str, *, trace: str = "") -> None:
        self.pins[owner] = environment.layers
        await super().hold(environment, owner, trace=trace)

    @override
    async def collect(self) -> list[str]:
        await anyio.lowlevel.checkpoint()
        named = {view.digest for view in self.fake.views.values()}
        pinned = {digest for layers in self.pins.values() for digest in layers}
        gone = [d for d in self.fake.layers if d not in named | pinned | self.fake.busy]
        for digest in gone:
            del self.fake.layers[digest]
        return gone


class PackableNode(Node):
    """A node whose sandboxes can be packed."""

    images: PackingImages  # type: ignore[mutable-override]

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.images = PackingImages()
        self.clock = SystemClock()  # worker threads read it too

    def backend(self) -> PackableBackend:
        return PackableBackend(self.clock, self.host, self.faults, self.images)

    def trajectory(self, sandbox: str) -> Path:
        return self.root / "state" / "sandboxes" / sandbox / TRAJECTORY

    def write(self, sandbox: str, **files: bytes) -> None:
        upper = self.root / "state" / "sandboxes" / sandbox / "upper"
        for name, data in files.items():
            (upper / name).write_bytes(data)


def read_files(directory: Path) -> Files:
    found: Iterable[Path] = sorted(directory.iterdir())
    return {path.name: path.read_bytes() for path in found}
