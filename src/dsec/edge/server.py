"""The edge over HTTP: operations on its sandboxes (spec/rest.md), and the control plane's calls.

`make_edge_app` gives the application; in one process with the apiserver it is called directly.
`EDGE_ROUTES` is the table of what is public, for the apiserver's OpenAPI description.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from dsec.base.clock import Clock
from dsec.base.errors import InvalidRequest
from dsec.base.ids import command_id, session_id
from dsec.edge import commands, files, queries
from dsec.edge.channel import AetherStream
from dsec.edge.environment_routes import environment_routes
from dsec.edge.handlers import Handlers
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.network_routes import NetworkApi, network_routes
from dsec.edge.phase_routes import PhaseApi, phase_routes
from dsec.edge.recording_ops import PORT
from dsec.edge.recording_routes import Marked, caller_of, recorded, recorded_routes
from dsec.edge.service import EdgeService
from dsec.edge.snapshot_routes import snapshot_routes
from dsec.edge.state_routes import StateApi, state_routes
from dsec.edge.streams import OCTETS, TAR, ChargedJson, RawStream, body_of, relay
from dsec.edge.tamper_routes import TamperApi, tamper_routes
from dsec.edge.trajectory_routes import trajectory_routes
from dsec.kit.generators import generator_of
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
from dsec.kit.table import JSON, NDJSON, row
from dsec.wire.edge_v1 import CreateOnEdge, ImageEvent, ListFilter, PauseOrder, StopOrder
from dsec.wire.public_v1 import BuildImage, ImageView, NodeView, PullImage
from dsec.wire.sandbox import (
    CommandEvent,
    CommandResult,
    CommandSpec,
    CommandView,
    FileInfo,
    Process,
    SandboxView,
    SessionSpec,
    SessionView,
    Usage,
    WatchStreamEvent,
)

S = "/v1/sandboxes/{id}"
E = "/edge/v1"
_PORT = re.compile("[0-9]{1,5}")


class Removed(Struct, kw_only=True):
    """How many entries a removal took away."""

    removed: int


class Unpacked(Struct, kw_only=True):
    """How many entries a tar stream had."""

    entries: int


class SandboxApi(Handlers):
    """Handlers of the operations on one sandbox."""

    async def _owner(self, request: Request) -> Owner:
        return await self.service.owner(request.path_params["id"])

    # the sandbox

    async def get_sandbox(self, request: Request) -> Response:
        """Look at a sandbox."""
        return json_response(await self.service.get(request.path_params["id"]))

    async def stop_sandbox(self, request: Request) -> LateJson:
        """Stop a sandbox; answered when nothing of it is left."""
        return LateJson(partial(self.service.stop, request.path_params["id"]))

    async def get_usage(self, request: Request) -> Response:
        """What it uses now, measured from outside."""
        return json_response(await self.service.usage(request.path_params["id"]))

    async def list_processes(self, request: Request) -> Response:
        """Its processes, by the ids it sees itself."""
        return json_response(await commands.processes(await self._owner(request)))

    # commands

    async def run_command(self, request: Request) -> Marked:
        """Run a command; answered when it has ended. The client may leave: the command goes on."""
        spec = await read_body(request, CommandSpec)
        if request.scope["query_string"] and read_query(request, queries.RunQuery).input:
            spec.stdin = "pipe"
        owner = await self._owner(request)
        run = partial(self.service.commands.run, owner, spec, caller_of(request))
        return Marked(ChargedJson(run))

    async def start_command(self, request: Request) -> Marked:
        """Start a command; it goes on by itself."""
        spec = await read_body(request, CommandSpec)
        owner = await self._owner(request)
        view = await self.service.commands.start(owner, spec, caller_of(request))
        return Marked(json_response(view, 201))

    async def stream_command(self, request: Request) -> Marked:
        """Run a command and hear what it says from the first byte."""
        spec = await read_body(request, CommandSpec)
        owner = await self._owner(request)
        return Marked(Ndjson(self.service.commands.stream(owner, spec, caller_of(request))))

    async def list_commands(self, request: Request) -> Response:
        """Commands running and ended, oldest first."""
        return json_response(await commands.views(await self._owner(request)))

    async def get_command(self, request: Request) -> Response:
        """Look at a command."""
        owner = await self._owner(request)
        return json_response(await self.service.commands.view(owner, _command(request)))

    async def get_result(self, request: Request) -> LateJson:
        """Wait for a command's end."""
        owner = await self._owner(request)
        return ChargedJson(partial(self.service.commands.result, owner, _command(request)))

    async def get_events(self, request: Request) -> Ndjson:
        """Hear what a command says, from given offsets or from now on."""
        query = read_query(request, queries.OffsetsQuery)
        owner = await self._owner(request)
        wanted = _command(request), query.stdout_from, query.stderr_from
        said = self.service.commands.events(owner, *wanted)
        return Ndjson(said)

    async def write_stdin(self, request: Request) -> Response:
        """Write to a command's standard input; answered when it has taken all."""
        query = read_query(request, queries.InputQuery)
        owner = await self._owner(request)
        command, data = _command(request), body_of(request)
        await commands.feed(owner, command, data, eof=query.eof, offset=query.offset)
        return Response(status_code=204)

    async def signal_command(self, request: Request) -> Response:
        """Send a signal to a command's process group."""
        number = read_query(request, queries.SignalQuery).number()
        await commands.signal(await self._owner(request), _command(request), number)
        return Response(status_code=204)

    async def resize_command(self, request: Request) -> Response:
        """Give a command's terminal another size."""
        size = read_query(request, queries.ResizeQuery)
        await commands.resize(await self._owner(request), _command(request), size.rows, size.cols)
        return Response(status_code=204)

    async def kill_command(self, request: Request) -> Response:
        """Kill a command's whole tree; harmless twice."""
        return json_response(await commands.kill(await self._owner(request), _command(request)))

    # sessions

    async def open_session(self, request: Request) -> Response:
        """Open a persistent shell."""
        spec = await read_body(request, SessionSpec)
        return json_response(await commands.open_session(await self._owner(request), spec), 201)

    async def list_sessions(self, request: Request) -> Response:
        """Sessions that are open."""
        return json_response(await commands.sessions(await self._owner(request)))

    async def close_session(self, request: Request) -> Response:
        """End a session and all it runs."""
        session = session_id(request.path_params["sid"])
        await commands.close_session(await self._owner(request), session)
        return Response(status_code=204)

    # files

    async def read_file(self, request: Request) -> Response:
        """Read a file as raw bytes."""
        args = read_query(request, queries.ReadQuery).arguments()
        owner = await self._owner(request)
        return RawStream(partial(_file, owner, args), OCTETS)

    async def write_file(self, request: Request) -> Response:
        """Write a file; if the body breaks off, the old one stays."""
        args = read_query(request, queries.WriteQuery).arguments()
        return json_response(await files.write(await self._owner(request), args, body_of(request)))

    async def remove_file(self, request: Request) -> Response:
        """Remove a file, or a tree."""
        args = read_query(request, queries.RecursiveQuery).arguments()
        return json_response(Removed(removed=await files.remove(await self._owner(request), args)))

    async def stat_file(self, request: Request) -> Response:
        """Look at a file."""
        args = read_query(request, queries.StatQuery).arguments()
        return json_response(await files.stat(await self._owner(request), args))

    async def list_files(self, request: Request) -> LateJson:
        """List a directory."""
        args = read_query(request, queries.ListQuery).arguments()
        return LateJson(partial(files.listdir, await self._owner(request), args))

    async def make_directory(self, request: Request) -> Response:
        """Make a directory."""
        args = read_query(request, queries.MkdirQuery).arguments()
        return json_response(await files.mkdir(await self._owner(request), args))

    async def move_file(self, request: Request) -> Response:
        """Rename a file or directory."""
        args = read_query(request, queries.MoveQuery).arguments()
        return json_response(await files.move(await self._owner(request), args))

    async def watch_files(self, request: Request) -> Ndjson:
        """Hear of changes below a directory."""
        args = read_query(request, queries.RecursiveQuery).arguments()
        return Ndjson(files.watch(await self._owner(request), args))

    async def read_tree(self, request: Request) -> Response:
        """Read a tree as one tar stream."""
        args = read_query(request, queries.OnPath).arguments()
        owner = await self._owner(request)
        return RawStream(partial(_tree, owner, args), TAR)

    async def write_tree(self, request: Request) -> Response:
        """Unpack a tar stream below a path."""
        args = read_query(request, queries.OnPath).arguments()
        entries = await files.unpack(await self._owner(request), args, body_of(request))
        return json_response(Unpacked(entries=entries))

    # ports

    async def connect_port(self, socket: WebSocket) -> None:
        """Connect to a port inside."""
        await relay(socket, partial(self._connecting, socket))

    @contextlib.asynccontextmanager
    async def _connecting(self, socket: WebSocket) -> AsyncIterator[AetherStream]:
        owner = await self.service.owner(socket.path_params["id"])
        port = _port(socket.path_params["port"])
        recording = await self.service.recordings.of(owner)
        async with (
            recorded(recording, PORT, {"port": port}, socket),
            files.connecting(owner, port) as stream,
        ):
            yield stream


class EdgeRest:
    """Handlers of the control plane's calls."""

    def __init__(self, service: EdgeService) -> None:
        self._service = service

    async def describe_node(self, _request: Request) -> Response:
        """How the node is."""
        return json_response(await self._service.describe())

    async def create_on_edge(self, request: Request) -> LateJson:
        """Create a sandbox under a given id."""
        body = await read_body(request, CreateOnEdge)
        return LateJson(partial(self._service.create, body))

    async def list_on_edge(self, request: Request) -> Response:
        """Sandboxes that match, newest first."""
        matching = await read_body(request, ListFilter)
        return json_response(await self._service.list_sandboxes(matching))

    async def stop_on_edge(self, request: Request) -> LateJson:
        """Stop a sandbox for a reason; answered when nothing of it is left."""
        order = read_query(request, StopOrder)
        return LateJson(partial(self._service.stop, request.path_params["id"], order))

    async def pause_on_edge(self, request: Request) -> LateJson:
        """Freeze it and take back its memory."""
        order = read_query(request, PauseOrder)
        return LateJson(partial(self._service.pause, request.path_params["id"], order))

    async def resume_on_edge(self, request: Request) -> LateJson:
        """Have it go on."""
        return LateJson(partial(self._service.resume, request.path_params["id"]))

    async def list_images(self, _request: Request) -> Response:
        """Images of the node."""
        return json_response(await self._service.images())

    async def remove_image(self, request: Request) -> Response:
        """Forget an image."""
        await self._service.remove_image(read_query(request, queries.NameQuery).name)
        return Response(status_code=204)

    async def pull_image(self, request: Request) -> Ndjson:
        """Import from a registry."""
        body = await read_body(request, PullImage)
        return Ndjson(generator_of(self._service.pull_image(body)))

    async def build_image(self, request: Request) -> Ndjson:
        """Build a distribution image."""
        body = await read_body(request, BuildImage)
        return Ndjson(generator_of(self._service.build_image(body)))

    async def import_image(self, request: Request) -> Ndjson:
        """Import an archive as it streams in."""
        name = read_query(request, queries.NameQuery).name
        events = self._service.import_image(name, body_of(request))
        return Ndjson(generator_of(events), reads_body=True)


def sandbox_routes(api: SandboxApi) -> list[Route]:
    """The table of the operations on one sandbox; the busiest first."""
    q, one = queries, f"{S}/commands/{{cid}}"
    return [
        _r("POST", f"{S}/commands/run", api.run_command, CommandSpec, q.RunQuery, CommandResult),
        _r("POST", f"{S}/commands", api.start_command, CommandSpec, None, CommandView, 201),
        _r("GET", f"{S}/commands", api.list_commands, None, None, list[CommandView]),
        _r("POST", f"{S}/commands/stream", api.stream_command, CommandSpec, None, CommandEvent),
        _r("GET", f"{S}/files", api.read_file, None, q.ReadQuery, bytes),
        _r("PUT", f"{S}/files", api.write_file, None, q.WriteQuery, FileInfo),
        _r("DELETE", f"{S}/files", api.remove_file, None, q.RecursiveQuery, Removed),
        _r("GET", S, api.get_sandbox, None, None, SandboxView),
        _r("DELETE", S, api.stop_sandbox, None, None, SandboxView),
        _r("GET", f"{one}/result", api.get_result, None, None, CommandResult),
        _r("GET", f"{one}/events", api.get_events, None, q.OffsetsQuery, CommandEvent),
        _r("POST", f"{one}/stdin", api.write_stdin, None, q.InputQuery, None, 204),
        _r("POST", f"{one}/signal", api.signal_command, None, q.SignalQuery, None, 204),
        _r("POST", f"{one}/resize", api.resize_command, None, q.ResizeQuery, None, 204),
        _r("GET", one, api.get_command, None, None, CommandView),
        _r("DELETE", one, api.kill_command, None, None, CommandView),
        _r("POST", f"{S}/sessions", api.open_session, SessionSpec, None, SessionView, 201),
        _r("GET", f"{S}/sessions", api.list_sessions, None, None, list[SessionView]),
        _r("DELETE", f"{S}/sessions/{{sid}}", api.close_session, None, None, None, 204),
        _r("GET", f"{S}/files/stat", api.stat_file, None, q.StatQuery, FileInfo),
        _r("GET", f"{S}/files/list", api.list_files, None, q.ListQuery, list[FileInfo]),
        _r("POST", f"{S}/files/mkdir", api.make_directory, None, q.MkdirQuery, FileInfo),
        _r("POST", f"{S}/files/move", api.move_file, None, q.MoveQuery, FileInfo),
        _r("GET", f"{S}/files/watch", api.watch_files, None, q.RecursiveQuery, WatchStreamEvent),
        _r("GET", f"{S}/tree", api.read_tree, None, q.OnPath, bytes),
        _r("PUT", f"{S}/tree", api.write_tree, None, q.OnPath, Unpacked),
        _r("GET", f"{S}/processes", api.list_processes, None, None, list[Process]),
        _r("GET", f"{S}/usage", api.get_usage, None, None, Usage),
    ]


def edge_routes(rest: EdgeRest, api: SandboxApi) -> list[Route]:
    """The table of the control plane's calls."""
    q = queries
    return [
        _r("GET", f"{E}/node", rest.describe_node, None, None, NodeView),
        _r("POST", f"{E}/sandboxes", rest.create_on_edge, CreateOnEdge, None, SandboxView),
        _r("POST", f"{E}/sandboxes:list", rest.list_on_edge, ListFilter, None, list[SandboxView]),
        _r("GET", f"{E}/sandboxes/{{id}}", api.get_sandbox, None, None, SandboxView),
        _r("DELETE", f"{E}/sandboxes/{{id}}", rest.stop_on_edge, None, StopOrder, SandboxView),
        _r(
            "POST", f"{E}/sandboxes/{{id}}/pause", rest.pause_on_edge, None, PauseOrder, SandboxView
        ),
        _r("POST", f"{E}/sandboxes/{{id}}/resume", rest.resume_on_edge, None, None, SandboxView),
        _r("GET", f"{E}/images", rest.list_images, None, None, list[ImageView]),
        _r("DELETE", f"{E}/images", rest.remove_image, None, q.NameQuery, None, 204),
        _r("POST", f"{E}/images/pull", rest.pull_image, PullImage, None, ImageEvent),
        _r("POST", f"{E}/images/build", rest.build_image, BuildImage, None, ImageEvent),
        _r("POST", f"{E}/images/import", rest.import_image, None, q.NameQuery, ImageEvent),
    ]


def make_edge_app(service: EdgeService, clock: Clock) -> ASGIApp:
    """The application of an edge that is running."""
    api = SandboxApi(service)
    ports = WebSocketRoute(f"{S}/ports/{{port}}", api.connect_port)
    table = [
        *sandbox_routes(api),
        *edge_routes(EdgeRest(service), api),
        *environment_routes(service),
        *snapshot_routes(service),
        *trajectory_routes(service),
        *state_routes(StateApi(service)),
        *network_routes(NetworkApi(service)),
        *phase_routes(PhaseApi(service)),
        *tamper_routes(TamperApi(service)),
    ]
    return make_app(recorded_routes(table, service), clock, extra=[ports])


@contextlib.asynccontextmanager
async def _file(
    owner: Owner, args: files.Args
) -> AsyncIterator[tuple[Mapping[str, str], AsyncIterator[bytes]]]:
    async with files.reading(owner, args) as (info, chunks):
        yield (
            {
                "x-file-mode": f"{info.mode:o}",
                "x-file-size": str(info.size_bytes),
                "x-file-mtime": repr(info.mtime),
            },
            chunks,
        )


@contextlib.asynccontextmanager
async def _tree(
    owner: Owner, args: files.Args
) -> AsyncIterator[tuple[Mapping[str, str], AsyncIterator[bytes]]]:
    async with files.packing(owner, args) as chunks:
        yield {}, chunks


def _command(request: Request) -> str:
    return command_id(request.path_params["cid"])


def _port(text: str) -> int:
    if not _PORT.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise InvalidRequest(f"port {text[:20]!r} is not 1 to 65535")
    return int(text)


_MEDIA: dict[object, str] = {
    bytes: OCTETS,
    CommandEvent: NDJSON,
    WatchStreamEvent: NDJSON,
    ImageEvent: NDJSON,
}


def _r(  # noqa: PLR0913 - a line of a table
    method: str,
    path: str,
    handler: Handler,
    body: type | None,
    query: type | None,
    answer: object,
    status: int = 200,
) -> Route:
    media_type = _MEDIA.get(answer, JSON)
    return row(method, path, handler, body, query, answer, status, media_type=media_type)


EDGE_ROUTES = [
    *sandbox_routes(SandboxApi(None)),
    *state_routes(StateApi(None)),
    *network_routes(NetworkApi(None)),
    *phase_routes(PhaseApi(None)),
    *tamper_routes(TamperApi(None)),
]
"""What the public API passes through, for its description."""
