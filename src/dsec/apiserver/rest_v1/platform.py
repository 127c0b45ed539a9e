"""Routes about the platform itself: versions, health, nodes."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from dsec.apiserver.gateway import caller_of
from dsec.control.nodes import Nodes
from dsec.kit.http import Route, json_response
from dsec.kit.table import row
from dsec.wire.public_v1 import NodeView, Version


class Health(Struct, kw_only=True):
    """That the server serves."""

    ok: bool = True


class PlatformRest:
    """Handlers and their table."""

    def __init__(self, nodes: Nodes, version: str) -> None:
        self._nodes = nodes
        self._version = json_response(Version(version=version))

    async def get_version(self, _request: Request) -> Response:
        """Versions of the server and its API."""
        return self._version

    async def get_health(self, _request: Request) -> Response:
        """Whether the server serves."""
        return json_response(Health())

    async def list_nodes(self, request: Request) -> Response:
        """How every node is."""
        return json_response(await self._nodes.list(caller_of(request)))

    def routes(self) -> list[Route]:
        """The table."""
        return [
            row("GET", "/v1/version", self.get_version, answer=Version, public=True),
            row("GET", "/healthz", self.get_health, answer=Health, public=True),
            row("GET", "/v1/nodes", self.list_nodes, answer=list[NodeView]),
        ]
