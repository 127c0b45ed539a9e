"""The public API's routes that are not about one sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated

from msgspec import Meta, Struct, field
from starlette.requests import Request
from starlette.responses import Response

from dsec.apiserver.gateway import caller_of
from dsec.base.errors import InvalidRequest
from dsec.base.states import SandboxState
from dsec.control.edges import Edges
from dsec.control.images import Images
from dsec.control.listing import Wanted, list_sandboxes
from dsec.control.nodes import Nodes
from dsec.control.sandboxes import Sandboxes
from dsec.kit.generators import generator_of
from dsec.kit.http import Ndjson, Route, json_response, read_body, read_query
from dsec.wire.public_v1 import (
    BatchItem,
    BuildImage,
    CreateBatch,
    CreateSandbox,
    ImageProgress,
    ImageReady,
    ImageView,
    NodeView,
    PullImage,
    SandboxList,
    Version,
)
from dsec.wire.sandbox import Heartbeat, SandboxView, StreamError

MAX_SPEC_BYTES = 1 << 20
NDJSON = "application/x-ndjson"
Once = Annotated[str, Meta(min_length=1, max_length=512)]


class ListQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which sandboxes to list. `label` (`k=v`) and `state` may be repeated."""

    label: str | list[str] = field(default_factory=list)
    state: str | list[str] = field(default_factory=list)
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    next: str = ""


class ImageQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which image."""

    name: Once


class Health(Struct, kw_only=True):
    """That the server serves."""

    ok: bool = True


class RestV1:
    """Handlers and their table."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        nodes: Nodes,
        images: Images,
        edges: Edges,
        version: str,
    ) -> None:
        self._sandboxes = sandboxes
        self._nodes = nodes
        self._images = images
        self._edges = edges
        self._version = json_response(Version(version=version))

    async def get_version(self, _request: Request) -> Response:
        """Versions of the server and its API."""
        return self._version

    async def get_health(self, _request: Request) -> Response:
        """Whether the server serves."""
        return json_response(Health())

    async def create_sandbox(self, request: Request) -> Response:
        """Create a sandbox and wait until it runs."""
        spec = await read_body(request, CreateSandbox, MAX_SPEC_BYTES)
        view = await self._sandboxes.create(caller_of(request), spec, _key(request))
        return json_response(view, 201)

    async def create_sandboxes(self, request: Request) -> Ndjson:
        """Create many alike; each is reported when it is ready."""
        batch = await read_body(request, CreateBatch, MAX_SPEC_BYTES)
        return Ndjson(self._sandboxes.create_batch(caller_of(request), batch, _key(request)))

    async def list_sandboxes(self, request: Request) -> Response:
        """List sandboxes, newest first."""
        query = read_query(request, ListQuery)
        wanted = Wanted(
            labels=_labels(_many(query.label)),
            states=_states(_many(query.state)),
            limit=query.limit,
            after=query.next,
        )
        page = await list_sandboxes(self._edges, caller_of(request), wanted)
        # A dead node must not hide the living ones; who cares can see that something is missing.
        headers = {"X-Dsec-Silent-Nodes": ",".join(page.silent)} if page.silent else None
        return json_response(page.listed, headers=headers)

    async def list_nodes(self, request: Request) -> Response:
        """How every node is."""
        return json_response(await self._nodes.list(caller_of(request)))

    async def list_images(self, request: Request) -> Response:
        """Images that sandboxes can be started from."""
        return json_response(await self._images.list(caller_of(request)))

    async def remove_image(self, request: Request) -> Response:
        """Forget an image."""
        name = read_query(request, ImageQuery).name
        await self._images.remove(caller_of(request), name)
        return Response(status_code=204)

    async def pull_image(self, request: Request) -> Ndjson:
        """Import an image from a registry."""
        wanted = await read_body(request, PullImage, MAX_SPEC_BYTES)
        return Ndjson(generator_of(self._images.pull(caller_of(request), wanted)))

    async def build_image(self, request: Request) -> Ndjson:
        """Build a distribution image."""
        wanted = await read_body(request, BuildImage, MAX_SPEC_BYTES)
        return Ndjson(generator_of(self._images.build(caller_of(request), wanted)))

    async def import_image(self, request: Request) -> Ndjson:
        """Import an image from an archive, which is the request's body."""
        name = read_query(request, ImageQuery).name
        taken = self._images.take_archive(caller_of(request), name, _chunks(request))
        return Ndjson(generator_of(taken), reads_body=True)

    def routes(self) -> list[Route]:
        """The table."""
        progress = (BatchItem, Heartbeat, StreamError)
        imported = ImageProgress | ImageReady | Heartbeat | StreamError
        return [
            Route(
                method="GET",
                path="/v1/version",
                handler=self.get_version,
                summary="Versions of the server and its API",
                answer=Version,
                public=True,
            ),
            Route(
                method="GET",
                path="/healthz",
                handler=self.get_health,
                summary="Whether the server serves",
                answer=Health,
                public=True,
            ),
            Route(
                method="POST",
                path="/v1/sandboxes",
                handler=self.create_sandbox,
                summary="Create a sandbox and wait until it runs",
                body=CreateSandbox,
                answer=SandboxView,
                status=201,
            ),
            Route(
                method="POST",
                path="/v1/sandboxes:batch",
                handler=self.create_sandboxes,
                summary="Create many alike; each is reported when it is ready",
                body=CreateBatch,
                answer=progress,
                media_type=NDJSON,
            ),
            Route(
                method="GET",
                path="/v1/sandboxes",
                handler=self.list_sandboxes,
                summary="List sandboxes, newest first",
                query=ListQuery,
                answer=SandboxList,
            ),
            Route(
                method="GET",
                path="/v1/nodes",
                handler=self.list_nodes,
                summary="How every node is",
                answer=list[NodeView],
            ),
            Route(
                method="GET",
                path="/v1/images",
                handler=self.list_images,
                summary="Images that sandboxes can be started from",
                answer=list[ImageView],
            ),
            Route(
                method="DELETE",
                path="/v1/images",
                handler=self.remove_image,
                summary="Forget an image",
                query=ImageQuery,
                status=204,
            ),
            Route(
                method="POST",
                path="/v1/images/pull",
                handler=self.pull_image,
                summary="Import an image from a registry",
                body=PullImage,
                answer=imported,
                media_type=NDJSON,
            ),
            Route(
                method="POST",
                path="/v1/images/build",
                handler=self.build_image,
                summary="Build a distribution image",
                body=BuildImage,
                answer=imported,
                media_type=NDJSON,
            ),
            Route(
                method="POST",
                path="/v1/images/import",
                handler=self.import_image,
                summary="Import an image from an archive, which is the request's body",
                query=ImageQuery,
                answer=imported,
                media_type=NDJSON,
            ),
        ]


def openapi_route(description: Mapping[str, object]) -> Route:
    """The route that serves the description of all routes, itself left out."""
    answer = json_response(description)

    async def get_openapi(_request: Request) -> Response:
        return answer

    return Route(
        method="GET",
        path="/openapi.json",
        handler=get_openapi,
        summary="This description",
        public=True,
    )


def _key(request: Request) -> str:
    return request.headers.get("idempotency-key", "")


def _many(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _labels(pairs: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"label {pair!r} is not of the form k=v")
        labels[name] = value
    return labels


def _states(names: list[str]) -> list[SandboxState]:
    try:
        return [SandboxState(name) for name in names]
    except ValueError as exc:
        known = ", ".join(SandboxState)
        raise InvalidRequest(f"{exc}; states are {known}") from None


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk
