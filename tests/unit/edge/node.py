"""A node for tests: an edge over simulated sandboxes, its images, and a client without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
from typing_extensions import override

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import DsecError, NotFound
from dsec.base.ids import NodeId, mint_sandbox_id
from dsec.edge.admission import AdmissionLimits
from dsec.edge.backends.interface import Backend
from dsec.edge.config import EdgeConfig
from dsec.edge.network.services import Services
from dsec.edge.server import make_edge_app
from dsec.edge.service import EdgeService
from dsec.edge.sim import Faults, SimBackend, SimHost
from dsec.images.records import Environment, EnvironmentPart, ImageRecord, view
from dsec.main.simulation import SimImages
from dsec.wire.edge_v1 import CreateOnEdge, ImageEvent
from dsec.wire.public_v1 import BuildImage, EnvironmentRef, ImageReady, ImageView, PullImage
from dsec.wire.sandbox import SandboxSpec

NODE = "n0de"


class AnyClock:
    """The clock of whatever runs the test: under Trio's MockClock it jumps."""

    def now(self) -> float:
        return 1.8e9 + anyio.current_time()

    def monotonic(self) -> float:
        return anyio.current_time()


class FakeImages(SimImages):
    """Images that are names, with one layer each, and who pins them."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.records = {"debian": image("debian")}
        self.pins: dict[str, list[str]] = {}
        self.far: anyio.Event | None = None
        """What holding the image `far` waits for."""
        self.refusal: DsecError | None = None
        """What holding the image `far` fails of."""

    @override
    async def hold(self, environment: Environment, owner: str, *, trace: str = "") -> None:
        if environment.image.name != "far":
            return
        if self.refusal is not None:
            raise self.refusal
        if self.far is not None:
            await self.far.wait()

    @override
    async def resolve(self, name: str) -> ImageRecord:
        if name not in self.records:
            raise NotFound(f"no image {name}", kind="image")
        return self.records[name]

    @override
    async def compose(self, wanted: EnvironmentRef) -> Environment:
        record = await self.resolve(wanted.image)
        part = EnvironmentPart(label="image", layers=record.layers)
        return Environment(image=view(record), parts=[part])

    @override
    async def mount(
        self, environment: Environment, sandbox: str, *, trace: str = "", record: bool = False
    ) -> list[Path]:
        self.pins[sandbox] = environment.layers
        return [Path("/nowhere")]

    @override
    async def release(self, sandbox: str) -> None:
        self.pins.pop(sandbox, None)

    @override
    def rebuild_pins(self, pins: Iterable[tuple[str, Iterable[str]]]) -> None:
        self.pins |= {sandbox: list(layers) for sandbox, layers in pins}

    @override
    async def list_images(self) -> list[ImageView]:
        return [view(record) for record in self.records.values()]

    @override
    async def remove(self, name: str) -> None:
        await self.resolve(name)
        del self.records[name]

    @override
    async def pull(self, request: PullImage) -> AsyncIterator[ImageEvent]:
        self.records[request.reference] = image(request.reference)
        yield ImageReady(image=view(self.records[request.reference]))

    @override
    async def build(self, request: BuildImage) -> AsyncIterator[ImageEvent]:
        name = request.name or request.distribution
        self.records[name] = image(name)
        yield ImageReady(image=view(self.records[name]))

    @override
    async def import_archive(
        self, name: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[ImageEvent]:
        size = sum([len(chunk) async for chunk in archive])
        self.records[name] = image(name, size)
        yield ImageReady(image=view(self.records[name]))


def image(name: str, size: int = 1) -> ImageRecord:
    return ImageRecord(
        name=name,
        digest="sha256:" + "0" * 64,
        layers=["sha256:" + "1" * 64],
        size_bytes=size,
        created_at=0.0,
        source="test",
    )


class Node:
    """What survives a restart of the edge, and the way to start one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = SimHost()
        self.faults = Faults()
        self.images = FakeImages()
        self.services = Services.of({})
        self.clock: Clock = AnyClock()

    @asynccontextmanager
    async def edge(
        self,
        *,
        limits: AdmissionLimits | None = None,
        after_write: Callable[[int], None] | None = None,
        backends: Sequence[Backend] = (),
    ) -> AsyncIterator[EdgeService]:
        config = EdgeConfig(
            node=NODE,
            state=self.root / "state",
            run=self.root / "run",
            limits=limits or AdmissionLimits(memory_floor_bytes=0),
            services=self.services,
        )
        mine = backends or [SimBackend(self.clock, host=self.host, faults=self.faults)]
        service = EdgeService(config, mine, self.images, self.clock, after_write=after_write)
        async with service.running():
            yield service

    @asynccontextmanager
    async def client(self, service: EdgeService) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(make_edge_app(service, self.clock))
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            yield client


def request(**spec: object) -> CreateOnEdge:
    fields: dict[str, object] = {"image": "debian", "backend": "sim", **spec}
    return CreateOnEdge(
        id=mint_sandbox_id(NodeId(NODE)),
        project="p",
        spec=SandboxSpec(**fields),  # type: ignore[arg-type]
    )
