"""Routes about snapshots; taking one is an operation on its sandbox."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from dsec.apiserver.gateway import caller_of
from dsec.control.snapshots import Snapshots
from dsec.kit.http import LateJson, Route, json_response
from dsec.kit.table import row
from dsec.wire.sandbox import DiffEntry, SnapshotView


class SnapshotsRest:
    """Handlers and their table."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    async def list_snapshots(self, request: Request) -> Response:
        """Snapshots of the caller's project, newest first."""
        return json_response(await self._snapshots.list(caller_of(request)))

    async def get_snapshot(self, request: Request) -> Response:
        """One of them; its `image` is what a sandbox is restored from."""
        name = request.path_params["name"]
        return json_response(await self._snapshots.get(caller_of(request), name))

    async def remove_snapshot(self, request: Request) -> Response:
        """Forget one that no sandbox stands on."""
        await self._snapshots.remove(caller_of(request), request.path_params["name"])
        return Response(status_code=204)

    async def diff_snapshot(self, request: Request) -> LateJson:
        """What one has changed, by path."""
        caller, name = caller_of(request), request.path_params["name"]
        return LateJson(partial(self._snapshots.diff, caller, name))

    def routes(self) -> list[Route]:
        """The table."""
        path, one = "/v1/snapshots", "/v1/snapshots/{name}"
        return [
            row("GET", path, self.list_snapshots, answer=list[SnapshotView]),
            row("GET", one, self.get_snapshot, answer=SnapshotView),
            row("DELETE", one, self.remove_snapshot, status=204),
            row("GET", f"{one}/diff", self.diff_snapshot, answer=list[DiffEntry]),
        ]
