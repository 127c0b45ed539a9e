"""The control plane's calls about layers, environments and the store."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from dsec.edge import queries
from dsec.edge.streams import body_of
from dsec.kit.generators import generator_of
from dsec.kit.http import LateJson, Ndjson, Route, json_response, read_body, read_query
from dsec.kit.table import NDJSON, row
from dsec.wire.edge_v1 import EdgeApi, ImageEvent, LayerEvent
from dsec.wire.environment_queries import (
    CollectQuery,
    LayerQuery,
    LayersQuery,
    PublishQuery,
    TraceQuery,
)
from dsec.wire.public_v1 import (
    CollectReport,
    LayerView,
    LintReport,
    LintRequest,
    StoreView,
    TraceView,
)

E = "/edge/v1"


class EnvironmentRest:
    """Handlers."""

    def __init__(self, service: EdgeApi) -> None:
        self._service = service

    async def list_layers(self, request: Request) -> Response:
        """Workspaces and toolkits that can be had here."""
        kind = read_query(request, LayersQuery).kind
        return json_response(await self._service.layers(kind))

    async def show_layer(self, request: Request) -> Response:
        """One of them."""
        query = read_query(request, LayerQuery)
        return json_response(await self._service.layer(query.kind, query.name))

    async def remove_layer(self, request: Request) -> Response:
        """Forget a version."""
        query = read_query(request, LayerQuery)
        await self._service.remove_layer(query.kind, query.name)
        return Response(status_code=204)

    async def publish_layer(self, request: Request) -> Ndjson:
        """Publish a version from a tar as it streams in."""
        query = read_query(request, PublishQuery)
        events = self._service.publish_layer(
            query.kind, query.name, query.description, body_of(request)
        )
        return Ndjson(generator_of(events), reads_body=True)

    async def push_image(self, request: Request) -> Ndjson:
        """Put an image into the shared store."""
        name = read_query(request, queries.NameQuery).name
        return Ndjson(generator_of(self._service.push_image(name)))

    async def lint(self, request: Request) -> LateJson:
        """Look an environment over."""
        body = await read_body(request, LintRequest)
        return LateJson(partial(self._service.lint, body))

    async def trace(self, request: Request) -> LateJson:
        """What a run read of an environment."""
        query = read_query(request, TraceQuery)
        return LateJson(partial(self._service.trace, query.environment(), query.trace))

    async def show_store(self, _request: Request) -> LateJson:
        """The shared store and this node's part of it."""
        return LateJson(self._service.store)

    async def collect_store(self, request: Request) -> LateJson:
        """Remove from the store what nothing refers to."""
        dry_run = read_query(request, CollectQuery).dry_run
        return LateJson(partial(self._service.collect_store, dry_run=dry_run))


def environment_routes(service: EdgeApi) -> list[Route]:
    """The table."""
    h, name = EnvironmentRest(service), queries.NameQuery
    layers, traced = f"{E}/layers", f"{E}/environments/trace"
    return [
        row("GET", layers, h.list_layers, None, LayersQuery, list[LayerView]),
        row("GET", f"{layers}/show", h.show_layer, None, LayerQuery, LayerView),
        row("DELETE", layers, h.remove_layer, None, LayerQuery, None, 204),
        row(
            "POST",
            f"{layers}/publish",
            h.publish_layer,
            query=PublishQuery,
            answer=LayerEvent,
            media_type=NDJSON,
        ),
        row(
            "POST",
            f"{E}/images/push",
            h.push_image,
            query=name,
            answer=ImageEvent,
            media_type=NDJSON,
        ),
        row("POST", f"{E}/environments/lint", h.lint, LintRequest, None, LintReport),
        row("GET", traced, h.trace, None, TraceQuery, TraceView),
        row("GET", f"{E}/store", h.show_store, None, None, StoreView),
        row("POST", f"{E}/store/collect", h.collect_store, None, CollectQuery, CollectReport),
    ]
