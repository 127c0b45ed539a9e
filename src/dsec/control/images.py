"""Images: what nodes can start sandboxes from. Every image operation goes to every node.

With one node that is all there is to it; with many, an image is complete when the last has it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import anyio

from dsec.base.errors import DsecError, NotFound, Unavailable
from dsec.control.access import Caller
from dsec.control.edges import Edge, Edges
from dsec.iam.permissions import Permission
from dsec.kit.generators import closing
from dsec.wire.edge_v1 import ImageEvent
from dsec.wire.public_v1 import BuildImage, ImageProgress, ImageReady, ImageView, PullImage

FANOUT_TIMEOUT_S = 10.0


class Images:
    """Images over all nodes."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def list(self, caller: Caller) -> list[ImageView]:
        """Images that some node has, by name.

        Raises:
            PermissionDenied: the caller may not see images.
            Unavailable: no node answers.
        """
        caller.require_somewhere(Permission.IMAGE_READ)
        found: dict[str, ImageView] = {}
        answered = 0
        for _, edge in self._edges.all():
            try:
                with anyio.fail_after(FANOUT_TIMEOUT_S):
                    images = await edge.api.images()
            except (DsecError, TimeoutError):
                continue
            answered += 1
            found |= {image.name: image for image in images}
        if not answered:
            raise Unavailable("no node answers")
        return [found[name] for name in sorted(found)]

    async def remove(self, caller: Caller, name: str) -> None:
        """Forget an image everywhere.

        Raises:
            PermissionDenied: the caller may not change images.
            NotFound: no node has it. Conflict: a sandbox uses it. Unavailable: a node is away.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)
        removed = False
        for edge in self._present():
            try:
                await edge.api.remove_image(name)
                removed = True
            except NotFound:
                continue
        if not removed:
            raise NotFound(f"no image {name!r}", kind="image")

    def pull(self, caller: Caller, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Import from a registry, on every node.

        Raises:
            PermissionDenied: the caller may not change images. Unavailable: no node is known.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)
        return self._everywhere(lambda edge: edge.api.pull_image(request))

    def build(self, caller: Caller, request: BuildImage) -> AsyncIterator[ImageEvent]:
        """Build a distribution image, on every node.

        Raises:
            PermissionDenied: the caller may not change images. Unavailable: no node is known.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)
        return self._everywhere(lambda edge: edge.api.build_image(request))

    def take_archive(
        self, caller: Caller, name: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[ImageEvent]:
        """Import an archive as it streams in: it can be read once, so on one node.

        Raises:
            PermissionDenied: the caller may not change images. Unavailable: no node is known.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)
        return self._present()[0].api.import_image(name, archive)

    def _present(self) -> Sequence[Edge]:
        edges = [edge for _, edge in self._edges.all()]
        if not edges:
            raise Unavailable("no node is known yet")
        return edges

    def _everywhere(
        self, start: Callable[[Edge], AsyncIterator[ImageEvent]]
    ) -> AsyncIterator[ImageEvent]:
        return _one_after_another([(edge, start) for edge in self._present()])


async def _one_after_another(
    work: list[tuple[Edge, Callable[[Edge], AsyncIterator[ImageEvent]]]],
) -> AsyncIterator[ImageEvent]:
    """Progress of all, and one `ready` at the end."""
    ready: ImageReady | None = None
    for edge, start in work:
        async with closing(start(edge)) as events:
            async for event in events:
                if isinstance(event, ImageProgress):
                    yield event
                else:
                    ready = event
    if ready is not None:
        yield ready
