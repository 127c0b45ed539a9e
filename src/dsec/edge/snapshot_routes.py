"""The control plane's calls about snapshots."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from dsec.kit.http import LateJson, Route, json_response, read_query
from dsec.kit.table import row
from dsec.wire.edge_v1 import EdgeApi
from dsec.wire.environment_queries import SnapshotQuery, SnapshotsQuery
from dsec.wire.sandbox import DiffEntry, SnapshotView

E = "/edge/v1/snapshots"


class SnapshotRest:
    """Handlers."""

    def __init__(self, service: EdgeApi) -> None:
        self._service = service

    async def list_snapshots(self, request: Request) -> Response:
        """A project's snapshots that can be had here."""
        project = read_query(request, SnapshotsQuery).project
        return json_response(await self._service.snapshots(project))

    async def remove_snapshot(self, request: Request) -> Response:
        """Forget one."""
        query = read_query(request, SnapshotQuery)
        await self._service.remove_snapshot(query.project, query.name)
        return Response(status_code=204)

    async def diff_snapshot(self, request: Request) -> LateJson:
        """What one has changed."""
        query = read_query(request, SnapshotQuery)
        return LateJson(partial(self._service.snapshot_diff, query.project, query.name))


def snapshot_routes(service: EdgeApi) -> list[Route]:
    """The table."""
    rest = SnapshotRest(service)
    return [
        row("GET", E, rest.list_snapshots, None, SnapshotsQuery, list[SnapshotView]),
        row("DELETE", E, rest.remove_snapshot, query=SnapshotQuery, status=204),
        row("GET", f"{E}/diff", rest.diff_snapshot, None, SnapshotQuery, list[DiffEntry]),
    ]
