"""Routes about images."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from dsec.apiserver.gateway import caller_of
from dsec.apiserver.rest_v1.bodies import MAX_SPEC_BYTES, chunks
from dsec.control.images import Images
from dsec.kit.generators import generator_of
from dsec.kit.http import Handler, Ndjson, Route, json_response, read_body, read_query
from dsec.kit.table import NDJSON, row
from dsec.wire.public_v1 import BuildImage, ImageProgress, ImageReady, ImageView, PullImage
from dsec.wire.sandbox import Heartbeat, StreamError


class ImageQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which image."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]


class ImagesRest:
    """Handlers and their table."""

    def __init__(self, images: Images) -> None:
        self._images = images

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
        taken = self._images.take_archive(caller_of(request), name, chunks(request))
        return Ndjson(generator_of(taken), reads_body=True)

    async def push_image(self, request: Request) -> Ndjson:
        """Put an image into the store that nodes share."""
        name = read_query(request, ImageQuery).name
        return Ndjson(generator_of(self._images.push(caller_of(request), name)))

    def routes(self) -> list[Route]:
        """The table."""
        path = "/v1/images"
        return [
            row("GET", path, self.list_images, answer=list[ImageView]),
            row("DELETE", path, self.remove_image, query=ImageQuery, status=204),
            _followed(f"{path}/pull", self.pull_image, body=PullImage),
            _followed(f"{path}/build", self.build_image, body=BuildImage),
            _followed(f"{path}/import", self.import_image, query=ImageQuery),
            _followed(f"{path}/push", self.push_image, query=ImageQuery),
        ]


def _followed(
    path: str, handler: Handler, *, body: type | None = None, query: type | None = None
) -> Route:
    answer = ImageProgress | ImageReady | Heartbeat | StreamError
    return row("POST", path, handler, body, query, answer, media_type=NDJSON)
