"""The control plane's call about trajectories whose nodes are away."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from dsec.kit.http import Route, json_response
from dsec.kit.table import row
from dsec.wire.edge_v1 import EdgeApi, SentTrajectory

E = "/edge/v1/trajectories"


class TrajectoryRest:
    """Its handler."""

    def __init__(self, service: EdgeApi) -> None:
        self._service = service

    async def show(self, request: Request) -> Response:
        """What the store says of one that was sent there; of any node's sandbox."""
        return json_response(await self._service.sent_trajectory(request.path_params["id"]))


def trajectory_routes(service: EdgeApi) -> list[Route]:
    """The table."""
    rest = TrajectoryRest(service)
    return [row("GET", f"{E}/{{id}}", rest.show, None, None, SentTrajectory)]
