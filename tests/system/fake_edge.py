"""An edge without sandboxes: answers the edge API and some operations, and can be told to fail."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from dsec.base.clock import SystemClock
from dsec.base.errors import CapacityUnavailable, DsecError, NotFound, SandboxGone
from dsec.base.states import FINAL, SandboxState
from dsec.edge.environment_routes import environment_routes
from dsec.edge.snapshot_routes import snapshot_routes
from dsec.edge.trajectory_routes import trajectory_routes
from dsec.kit.http import (
    Handler,
    LateJson,
    Ndjson,
    Route,
    json_response,
    make_app,
    read_body,
    read_query,
)
from dsec.wire.edge_v1 import (
    ASKED,
    PLAIN,
    PRINCIPAL_HEADER,
    PROJECT_HEADER,
    CreateOnEdge,
    ImageEvent,
    ListFilter,
    PauseOrder,
    SentTrajectory,
    StopOrder,
)
from dsec.wire.public_v1 import (
    BuildImage,
    ImageProgress,
    ImageReady,
    ImageView,
    NodeView,
    PullImage,
)
from dsec.wire.sandbox import Pause, SandboxView
from tests.system.fake_environments import FakeEnvironments

S = "/v1/sandboxes/{id}"


class FakeEdge(FakeEnvironments):
    def __init__(self, node: str = "n001", *, cpus: int = 4) -> None:
        super().__init__(node)
        self.cpus = cpus
        self.sandboxes: dict[str, SandboxView] = {}
        self.sent: dict[str, str] = {}
        """Projects of the trajectories in its store, by sandbox."""
        self.store_failure: DsecError | None = None
        self.created = 0
        self.refusal: DsecError | None = None
        self.away: DsecError | None = None
        self.hang = False
        self.gate: anyio.Event | None = None
        self.cancelled = anyio.Event()
        self.port_callers: list[str] = []
        self.app = edge_app(self)

    def full(self) -> None:
        self.refusal = CapacityUnavailable("full")

    async def describe(self) -> NodeView:
        await self._reach()
        running = sum(1 for v in self.sandboxes.values() if v.state not in FINAL)
        return NodeView(
            id=self.node,
            version="0",
            backends=["sim", "container"],
            running=running,
            cpus=self.cpus,
        )

    async def _reach(self) -> None:
        if self.hang:
            await anyio.sleep_forever()
        if self.away:
            raise self.away

    async def create(self, request: CreateOnEdge) -> SandboxView:
        await self._reach()
        if view := self.sandboxes.get(request.id):
            return view
        if self.refusal:
            raise self.refusal
        if request.spec.image not in self.image_names:
            raise NotFound(f"no image {request.spec.image!r}", kind="image")
        spec = request.spec
        workspace = await self.layer("workspace", spec.workspace) if spec.workspace else None
        toolkits = [await self.layer("toolkit", name) for name in spec.toolkits]
        self.created += 1
        view = SandboxView(
            id=request.id,
            node=self.node,
            backend=request.spec.backend,
            image=request.spec.image,
            workspace=workspace.name if workspace else "",
            toolkits=[view.name for view in toolkits],
            state=SandboxState.RUNNING,
            created_at=1000.0 + self.created,
            limits=request.spec.limits,
            labels=dict(request.spec.labels),
            project=request.project,
            job=request.spec.job or "",
            step=request.spec.step,
            group=request.spec.group,
            epoch=request.spec.epoch,
            security=request.spec.security,
        )
        self.sandboxes[request.id] = view
        if self.gate:
            await self.gate.wait()
        return view

    async def get(self, sandbox: str) -> SandboxView:
        await self._reach()
        try:
            return self.sandboxes[sandbox]
        except KeyError:
            raise NotFound(f"no sandbox {sandbox}", kind="sandbox") from None

    async def list_sandboxes(self, matching: ListFilter) -> list[SandboxView]:
        await self._reach()
        return [
            view
            for view in self.sandboxes.values()
            if matching.project in ("", view.project)
            and matching.job in ("", view.job)
            and matching.labels.items() <= view.labels.items()
            and (not matching.states or view.state in matching.states)
        ]

    async def stop(self, sandbox: str, order: StopOrder = ASKED) -> SandboxView:
        view = await self.get(sandbox)
        self.sandboxes[sandbox] = msgspec.structs.replace(
            view,
            state=SandboxState.STOPPED,
            stop_reason=order.reason,
            stop_detail=order.detail,
        )
        return self.sandboxes[sandbox]

    async def pause(self, sandbox: str, order: PauseOrder = PLAIN) -> SandboxView:
        return await self._move(sandbox, SandboxState.PAUSED, Pause(at=0.0, held=order.held))

    async def resume(self, sandbox: str) -> SandboxView:
        return await self._move(sandbox, SandboxState.RUNNING)

    async def _move(
        self, sandbox: str, state: SandboxState, pause: Pause | None = None
    ) -> SandboxView:
        view = await self.get(sandbox)
        if self.refusal:
            raise self.refusal
        if view.state in FINAL:
            raise SandboxGone(f"{sandbox} is over", reason="requested")
        self.sandboxes[sandbox] = msgspec.structs.replace(view, state=state, pause=pause)
        return self.sandboxes[sandbox]

    async def sent_trajectory(self, sandbox: str) -> SentTrajectory:
        await self._reach()
        if self.store_failure:
            raise self.store_failure
        if sandbox not in self.sent:
            raise NotFound("nothing is known of it", kind="sandbox")
        return SentTrajectory(sandbox=sandbox, project=self.sent[sandbox])

    async def images(self) -> list[ImageView]:
        await self._reach()
        return [ImageView(name=name, digest="sha256:0", layers=[]) for name in self.image_names]

    async def remove_image(self, name: str) -> None:
        await self._reach()
        if name not in self.image_names:
            raise NotFound(f"no image {name!r}", kind="image")
        self.image_names.remove(name)

    async def pull_image(self, request: PullImage) -> AsyncIterator[ImageEvent]:
        if request.reference == "missing":
            raise NotFound("no such reference", kind="image")
        yield ImageProgress(step="fetch")
        if request.reference == "broken":
            raise NotFound("a layer is missing", kind="image")
        name = request.name or request.reference
        self.image_names.append(name)
        yield ImageReady(image=ImageView(name=name, digest="sha256:0", layers=[]))

    async def build_image(self, request: BuildImage) -> AsyncIterator[ImageEvent]:
        yield ImageReady(image=ImageView(name=request.distribution, digest="", layers=[]))

    async def import_image(
        self, name: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[ImageEvent]:
        size = 0
        async for chunk in archive:
            size += len(chunk)
        yield ImageReady(image=ImageView(name=name, digest="", layers=[], size_bytes=size))


class Handlers:
    """Both halves: the edge API for another process, and operations on one sandbox."""

    def __init__(self, edge: FakeEdge) -> None:
        self.edge = edge

    async def get(self, request: Request) -> Response:
        return json_response(await self.edge.get(request.path_params["id"]))

    async def delete(self, request: Request) -> Response:
        order = read_query(request, StopOrder)
        return json_response(await self.edge.stop(request.path_params["id"], order))

    async def pause(self, request: Request) -> Response:
        order = read_query(request, PauseOrder)
        return json_response(await self.edge.pause(request.path_params["id"], order))

    async def resume(self, request: Request) -> Response:
        return json_response(await self.edge.resume(request.path_params["id"]))

    async def run(self, request: Request) -> LateJson:
        await request.body()

        async def work() -> object:
            if self.edge.gate:
                try:
                    await self.edge.gate.wait()
                except anyio.get_cancelled_exc_class():
                    self.edge.cancelled.set()
                    raise
            return {"exit_code": 0}

        return LateJson(work, keepalive_s=0.02)

    async def stream(self, request: Request) -> Ndjson:
        await request.body()

        async def events() -> AsyncGenerator[object, None]:
            yield {"type": "started"}
            if self.edge.gate:
                try:
                    await self.edge.gate.wait()
                except anyio.get_cancelled_exc_class():
                    self.edge.cancelled.set()
                    raise
            yield {"type": "exited"}

        return Ndjson(events(), keepalive_s=0.02)

    async def trajectory(self, request: Request) -> Response:
        allowed = request.headers.get(PROJECT_HEADER, "")
        return json_response({"told_by": self.edge.node, "allowed": allowed})

    async def echo(self, request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream")

    async def headers(self, request: Request) -> Response:
        return json_response(dict(request.headers.items()) | {"query": request.url.query})

    async def breaks(self, _request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b"the beginning"
            raise RuntimeError("broken on purpose")

        return StreamingResponse(body())

    async def node(self, _request: Request) -> Response:
        return json_response(await self.edge.describe())

    async def create(self, request: Request) -> Response:
        return json_response(await self.edge.create(await read_body(request, CreateOnEdge)), 201)

    async def list_all(self, request: Request) -> Response:
        return json_response(await self.edge.list_sandboxes(await read_body(request, ListFilter)))

    async def images(self, _request: Request) -> Response:
        return json_response(await self.edge.images())

    async def remove(self, request: Request) -> Response:
        await self.edge.remove_image(request.query_params["name"])
        return Response(status_code=204)

    async def pull(self, request: Request) -> Ndjson:
        return Ndjson(_generator(self.edge.pull_image(await read_body(request, PullImage))))

    async def build(self, request: Request) -> Ndjson:
        return Ndjson(_generator(self.edge.build_image(await read_body(request, BuildImage))))

    async def import_archive(self, request: Request) -> Ndjson:
        archive = self.edge.import_image(request.query_params["name"], request.stream())
        return Ndjson(_generator(archive), reads_body=True)

    async def port(self, socket: WebSocket) -> None:
        if socket.path_params["port"] == "1":
            raise NotFound("nothing listens", kind="port")
        self.edge.port_callers.append(socket.headers.get(PRINCIPAL_HEADER, ""))
        await socket.accept()
        try:
            while data := await socket.receive_bytes():
                await socket.send_bytes(data[::-1])
        except WebSocketDisconnect:
            return
        await socket.close(1000)


def edge_app(edge: FakeEdge) -> ASGIApp:
    h = Handlers(edge)
    table: list[tuple[str, str, Handler]] = [
        ("GET", S, h.get),
        ("DELETE", S, h.delete),
        ("POST", f"{S}/pause", h.pause),
        ("POST", f"{S}/resume", h.resume),
        ("POST", f"{S}/commands/run", h.run),
        ("POST", f"{S}/commands/stream", h.stream),
        ("PUT", f"{S}/files", h.echo),
        ("GET", f"{S}/headers", h.headers),
        ("GET", f"{S}/trajectory", h.trajectory),
        ("GET", f"{S}/breaks", h.breaks),
        ("GET", "/edge/v1/node", h.node),
        ("POST", "/edge/v1/sandboxes", h.create),
        ("POST", "/edge/v1/sandboxes:list", h.list_all),
        ("GET", "/edge/v1/sandboxes/{id}", h.get),
        ("DELETE", "/edge/v1/sandboxes/{id}", h.delete),
        ("POST", "/edge/v1/sandboxes/{id}/pause", h.pause),
        ("POST", "/edge/v1/sandboxes/{id}/resume", h.resume),
        ("GET", "/edge/v1/images", h.images),
        ("DELETE", "/edge/v1/images", h.remove),
        ("POST", "/edge/v1/images/pull", h.pull),
        ("POST", "/edge/v1/images/build", h.build),
        ("POST", "/edge/v1/images/import", h.import_archive),
    ]
    routes = [Route(method=m, path=p, handler=handler, summary="") for m, p, handler in table]
    routes += environment_routes(edge)
    routes += snapshot_routes(edge)
    routes += trajectory_routes(edge)
    return make_app(routes, SystemClock(), extra=[WebSocketRoute(f"{S}/ports/{{port}}", h.port)])


async def _generator(events: AsyncIterator[ImageEvent]) -> AsyncGenerator[object, None]:
    async for event in events:
        yield event
