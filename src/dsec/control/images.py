"""Images: what nodes can start sandboxes from. Every image operation goes to every node.

With one node that is all there is to it; with many, an image is complete when the last has it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from dsec.base.errors import Conflict
from dsec.base.states import FINAL
from dsec.control import everywhere
from dsec.control.access import Caller
from dsec.control.edges import Edges
from dsec.iam.permissions import Permission
from dsec.wire.edge_v1 import EdgeApi, ImageEvent, ListFilter
from dsec.wire.public_v1 import BuildImage, ImageView, PullImage


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
        answers = await everywhere.gather(self._edges, lambda api: api.images())
        found = {image.name: image for images in answers for image in images}
        return [found[name] for name in sorted(found)]

    async def remove(self, caller: Caller, name: str) -> None:
        """Forget an image everywhere.

        Raises:
            PermissionDenied: the caller may not change images.
            NotFound: no node has it. Conflict: a sandbox uses it. Unavailable: a node is away.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)

        names = {name, f"{name}:latest"}  # a name without a tag means this one

        async def check_unused(api: EdgeApi) -> None:
            known = await api.list_sandboxes(ListFilter())
            users = sorted(s.id for s in known if s.image in names and s.state not in FINAL)
            if users:
                raise Conflict(f"image {name} is used by {users[0]}", users=len(users))

        await everywhere.remove(self._edges, lambda api: api.remove_image(name), check_unused)

    def pull(self, caller: Caller, request: PullImage) -> AsyncIterator[ImageEvent]:
        """Import from a registry, on every node.

        Raises:
            PermissionDenied: the caller may not change images. Unavailable: no node is known.
        """
        return self._on_all(caller, lambda api: api.pull_image(request))

    def build(self, caller: Caller, request: BuildImage) -> AsyncIterator[ImageEvent]:
        """Build a distribution image, on every node.

        Raises:
            PermissionDenied: the caller may not change images. Unavailable: no node is known.
        """
        return self._on_all(caller, lambda api: api.build_image(request))

    def take_archive(
        self, caller: Caller, name: str, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[ImageEvent]:
        """Import an archive as it streams in: it can be read once, so on one node.

        Raises:
            PermissionDenied: the caller may not change images. Unavailable: no node is known.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)
        return everywhere.present(self._edges)[0].api.import_image(name, archive)

    def push(self, caller: Caller, name: str) -> AsyncIterator[ImageEvent]:
        """Put an image into the shared store, from the first node that has it.

        Raises:
            PermissionDenied: the caller may not change images. Unavailable: no node is known.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)
        known = everywhere.present(self._edges)
        return everywhere.first_stream(known, lambda api: api.push_image(name))

    def _on_all(self, caller: Caller, start: everywhere.Start) -> AsyncIterator[ImageEvent]:
        caller.require_everywhere(Permission.IMAGE_WRITE)
        return everywhere.one_after_another(everywhere.present(self._edges), start)
