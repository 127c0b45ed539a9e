"""Routes about a sandbox's network."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from dsec.edge.handlers import Handlers
from dsec.kit.http import LateJson, Route, json_response, read_body
from dsec.kit.table import row
from dsec.wire.sandbox import NetworkChange, NetworkView

NETWORK = "/v1/sandboxes/{id}/network"


class NetworkApi(Handlers):
    """Handlers."""

    async def get_network(self, request: Request) -> Response:
        """Its rules, its traffic, and what was denied."""
        return json_response(await self.service.network(request.path_params["id"]))

    async def set_network(self, request: Request) -> LateJson:
        """Replace all its rules; in force on return, and what they forbid is cut."""
        change = await read_body(request, NetworkChange)
        return LateJson(partial(self.service.set_network, request.path_params["id"], change))


def network_routes(api: NetworkApi) -> list[Route]:
    """The table."""
    return [
        row("GET", NETWORK, api.get_network, None, None, NetworkView),
        row("PUT", NETWORK, api.set_network, NetworkChange, None, NetworkView),
    ]
