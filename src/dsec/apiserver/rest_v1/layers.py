"""Routes about layers: workspaces and toolkits."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from dsec.apiserver.gateway import caller_of
from dsec.apiserver.rest_v1.bodies import chunks
from dsec.control.layers import Layers
from dsec.kit.generators import generator_of
from dsec.kit.http import Ndjson, Route, json_response, read_query
from dsec.kit.table import NDJSON, row
from dsec.wire.environment_queries import LayerQuery, LayersQuery, PublishQuery
from dsec.wire.public_v1 import ImageProgress, LayerReady, LayerView
from dsec.wire.sandbox import Heartbeat, StreamError


class LayersRest:
    """Handlers and their table."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    async def list_layers(self, request: Request) -> Response:
        """Workspaces and toolkits that sandboxes can be composed of."""
        kind = read_query(request, LayersQuery).kind
        return json_response(await self._layers.list(caller_of(request), kind))

    async def show_layer(self, request: Request) -> Response:
        """One version; if none is named, the newest."""
        wanted = read_query(request, LayerQuery)
        return json_response(await self._layers.show(caller_of(request), wanted))

    async def remove_layer(self, request: Request) -> Response:
        """Forget a version that no sandbox uses."""
        await self._layers.remove(caller_of(request), read_query(request, LayerQuery))
        return Response(status_code=204)

    async def publish_layer(self, request: Request) -> Ndjson:
        """Publish a version from a tar, plain or compressed, which is the request's body."""
        wanted = read_query(request, PublishQuery)
        events = self._layers.publish(caller_of(request), wanted, chunks(request))
        return Ndjson(generator_of(events), reads_body=True)

    def routes(self) -> list[Route]:
        """The table."""
        path = "/v1/layers"
        published = ImageProgress | LayerReady | Heartbeat | StreamError
        return [
            row("GET", path, self.list_layers, None, LayersQuery, list[LayerView]),
            row("GET", f"{path}/show", self.show_layer, None, LayerQuery, LayerView),
            row("DELETE", path, self.remove_layer, query=LayerQuery, status=204),
            row(
                "POST",
                f"{path}/publish",
                self.publish_layer,
                query=PublishQuery,
                answer=published,
                media_type=NDJSON,
            ),
        ]
