"""The part of a fake edge that is about layers, environments and the store."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import AsyncIterator

from msgspec.structs import replace

from dsec.base.errors import Conflict, InvalidRequest, NotFound, Unsupported
from dsec.wire.edge_v1 import ImageEvent, LayerEvent
from dsec.wire.public_v1 import (
    CollectReport,
    EnvironmentRef,
    ImageProgress,
    ImageReady,
    ImageView,
    LayerKind,
    LayerReady,
    LayerView,
    LintFinding,
    LintReport,
    LintRequest,
    StoreView,
    TracePart,
    TraceRead,
    TraceView,
)
from dsec.wire.sandbox import DiffEntry, SnapshotView

COUNT_FROM = 1000.0
STORE_URL = "file:///store"


class FakeEnvironments:
    """Keeps what is published in memory, by digest of what was sent."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.image_names = ["debian"]
        self.store_url = STORE_URL
        self.published: dict[tuple[LayerKind, str], LayerView] = {}
        self.archives: dict[str, bytes] = {}
        self.traces: dict[tuple[str, str], TraceView] = {}
        self.garbage = [5, 7]
        self.collections: list[bool] = []
        self.kept: dict[tuple[str, str], SnapshotView] = {}

    def snapshot(self, project: str, name: str, **more: object) -> SnapshotView:
        """Have a snapshot, and its image."""
        image = f"snapshots/{project}/{name}"
        fields: dict[str, object] = {"created_at": 1.0, **more}
        view = SnapshotView(
            name=name,
            image=image,
            digest="sha256:0",
            parent="debian",
            sandbox="",
            project=project,
            **fields,  # type: ignore[arg-type]
        )
        self.kept[project, name] = view
        self.image_names.append(image)
        return view

    async def snapshots(self, project: str) -> list[SnapshotView]:
        return [view for (of, _), view in self.kept.items() if of == project]

    async def remove_snapshot(self, project: str, name: str) -> None:
        if (project, name) not in self.kept:
            raise NotFound(f"no snapshot {name!r}", kind="snapshot")
        self.image_names.remove(self.kept.pop((project, name)).image)

    async def snapshot_diff(self, project: str, name: str) -> list[DiffEntry]:
        if (project, name) not in self.kept:
            raise NotFound(f"no snapshot {name!r}", kind="snapshot")
        return [DiffEntry(path=f"/{self.node}", change="added", kind="file")]

    async def layers(self, kind: LayerKind | None = None) -> list[LayerView]:
        return [view for view in self.published.values() if kind in (None, view.kind)]

    async def layer(self, kind: LayerKind, name: str) -> LayerView:
        versioned = ":" in name
        found = [
            view
            for (of, full), view in self.published.items()
            if of == kind and name == (full if versioned else full.rpartition(":")[0])
        ]
        if not found:
            raise NotFound(f"no {kind} {name!r}", kind="layer")
        return max(found, key=lambda view: view.created_at)

    async def remove_layer(self, kind: LayerKind, name: str) -> None:
        view = await self.layer(kind, name)
        if view.used_by:
            raise Conflict(f"{kind} {view.name} is in use")
        del self.published[kind, view.name]

    async def publish_layer(
        self, kind: LayerKind, name: str, description: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[LayerEvent]:
        if ":" not in name:
            raise InvalidRequest("a layer is published under name:version")
        data = b""
        async for chunk in archive:
            data += chunk
            yield ImageProgress(step="take in", done=len(data))
        view = self._publish(kind, name, description, data)
        yield LayerReady(layer=view)

    def _publish(self, kind: LayerKind, name: str, description: str, data: bytes) -> LayerView:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        known = self.published.get((kind, name))
        if known is not None:
            if known.digest != digest:
                raise Conflict(f"{kind} {name} has another content")
            return known
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = tar.getmembers()
        view = LayerView(
            kind=kind,
            name=name,
            digest=digest,
            size_bytes=sum(member.size for member in members),
            entries=len(members),
            created_at=COUNT_FROM + len(self.published),
            description=description,
        )
        self.published[kind, name] = view
        self.archives[digest] = data
        return view

    def use(self, kind: LayerKind, name: str) -> None:
        """Have a sandbox stand on it."""
        view = self.published[kind, name]
        self.published[kind, name] = replace(view, used_by=view.used_by + 1)

    async def push_image(self, name: str) -> AsyncIterator[ImageEvent]:
        if name not in self.image_names:
            raise NotFound(f"no image {name!r}", kind="image")
        self._need_store()
        yield ImageProgress(step="push", done=1, total=1)
        yield ImageReady(image=ImageView(name=name, digest="sha256:0", layers=[]))

    def _need_store(self) -> None:
        if not self.store_url:
            raise Unsupported("this node has no store")

    async def _check(self, environment: EnvironmentRef) -> None:
        if environment.image not in self.image_names:
            raise NotFound(f"no image {environment.image!r}", kind="image")
        if environment.workspace:
            await self.layer("workspace", environment.workspace)
        for toolkit in environment.toolkits:
            await self.layer("toolkit", toolkit)

    async def lint(self, request: LintRequest) -> LintReport:
        await self._check(request)
        findings = [
            LintFinding(rule="answer", severity="error", message=f"found {text!r}", path="/a")
            for text in request.answers
            if "answer" not in request.disabled
        ]
        return LintReport(
            environment=EnvironmentRef(
                image=request.image, workspace=request.workspace, toolkits=request.toolkits
            ),
            findings=findings,
            layers=1,
            rules=["answer", *(rule.id for rule in request.rules)],
        )

    def record(self, image: str, trace: str, at: float) -> None:
        """Have a run of an image recorded."""
        self.traces[image, trace] = TraceView(
            environment=EnvironmentRef(image=image),
            trace=trace,
            recorded_at=at,
            parts=[TracePart(layer="image", digest="sha256:0", size_bytes=100, read_bytes=9)],
            reads=[TraceRead(at_ms=1, part=0, offset=0, length=9)],
            total_bytes=100,
            read_bytes=9,
        )

    async def trace(self, environment: EnvironmentRef, trace: str) -> TraceView:
        await self._check(environment)
        found = self.traces.get((environment.image, trace))
        if found is None:
            raise NotFound("nothing was recorded", kind="trace")
        return replace(found, environment=environment)

    async def store(self) -> StoreView:
        return StoreView(node=self.node, url=self.store_url, cache_budget_bytes=1 << 30)

    async def collect_store(self, *, dry_run: bool) -> CollectReport:
        self._need_store()
        self.collections.append(dry_run)
        found = list(self.garbage)
        if not dry_run:
            self.garbage.clear()
        return CollectReport(
            dry_run=dry_run, blobs=len(found), bytes=sum(found), kept_blobs=len(self.archives)
        )
