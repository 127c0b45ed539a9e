"""Routes about a sandbox's state: pause, resume, resize, pack, fork, and what happened in it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from msgspec import Meta, Struct, field
from starlette.requests import Request
from starlette.responses import Response

from dsec.edge.handlers import Handlers
from dsec.edge.recording_ops import checked_names
from dsec.edge.retelling import Part
from dsec.kit.http import LateJson, Ndjson, Route, json_response, read_body, read_query
from dsec.kit.table import NDJSON, row
from dsec.wire.edge_v1 import PRINCIPAL_HEADER, PROJECT_HEADER
from dsec.wire.public_v1 import BatchItem
from dsec.wire.sandbox import (
    DiffEntry,
    Fork,
    Heartbeat,
    Pack,
    Recorded,
    Resize,
    SandboxView,
    SnapshotView,
    StreamError,
)

S = "/v1/sandboxes/{id}"


class TrajectoryQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which part of a trajectory."""

    since: Annotated[int, Meta(ge=1)] = 1
    """First `seq`."""
    until: Annotated[int, Meta(ge=1)] | None = None
    """Last `seq`; None = all there is."""
    op: str | list[str] = field(default_factory=list)
    """These operations only."""


class StateApi(Handlers):
    """Handlers."""

    async def pause(self, request: Request) -> LateJson:
        """Freeze it and take back its memory; whatever is asked of it next resumes it."""
        return LateJson(partial(self.service.pause, request.path_params["id"]))

    async def resume(self, request: Request) -> LateJson:
        """Have it go on where it was paused."""
        return LateJson(partial(self.service.resume, request.path_params["id"]))

    async def resize(self, request: Request) -> Response:
        """Give it other limits, or another class, while it runs."""
        change = await read_body(request, Resize)
        return json_response(await self.service.resize(request.path_params["id"], change))

    async def pack(self, request: Request) -> LateJson:
        """Take a snapshot of what it has written (pack_diff)."""
        wanted = await read_body(request, Pack)
        principal = request.headers.get(PRINCIPAL_HEADER, "")
        return LateJson(partial(self.service.pack, request.path_params["id"], wanted, principal))

    async def diff(self, request: Request) -> LateJson:
        """What it has written so far, by path."""
        return LateJson(partial(self.service.diff, request.path_params["id"]))

    async def fork(self, request: Request) -> Ndjson:
        """Make sandboxes that begin where this one stands; each is reported when it runs."""
        wanted = await read_body(request, Fork)
        principal = request.headers.get(PRINCIPAL_HEADER, "")
        return Ndjson(self.service.fork(request.path_params["id"], wanted, principal))

    async def trajectory(self, request: Request) -> Ndjson:
        """What has happened in it, in order; also when it is over."""
        query = read_query(request, TrajectoryQuery)
        ops = checked_names([query.op] if isinstance(query.op, str) else query.op)
        part = Part(query.since, query.until, ops)
        project = request.headers.get(PROJECT_HEADER, "")
        return Ndjson(self.service.trajectory(request.path_params["id"], part, project))


def state_routes(api: StateApi) -> list[Route]:
    """The table."""
    return [
        row("POST", f"{S}/pause", api.pause, None, None, SandboxView),
        row("POST", f"{S}/resume", api.resume, None, None, SandboxView),
        row("PATCH", S, api.resize, Resize, None, SandboxView),
        row("POST", f"{S}/pack", api.pack, Pack, None, SnapshotView),
        row("GET", f"{S}/diff", api.diff, None, None, list[DiffEntry]),
        row(
            "POST",
            f"{S}/fork",
            api.fork,
            Fork,
            answer=(BatchItem, Heartbeat, StreamError),
            media_type=NDJSON,
        ),
        row(
            "GET",
            f"{S}/trajectory",
            api.trajectory,
            None,
            TrajectoryQuery,
            answer=(Recorded, Heartbeat, StreamError),
            media_type=NDJSON,
        ),
    ]
