"""Layers: workspaces and toolkits that sandboxes are composed of, beside their image.

All projects share them, as they share images, and the rights are those on images.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable

from msgspec.structs import replace

from dsec.base.errors import Conflict
from dsec.base.states import FINAL
from dsec.control import everywhere
from dsec.control.access import Caller
from dsec.control.edges import Edges
from dsec.iam.permissions import Permission
from dsec.wire.edge_v1 import EdgeApi, LayerEvent, ListFilter
from dsec.wire.environment_queries import LayerQuery, PublishQuery
from dsec.wire.public_v1 import LayerKind, LayerView
from dsec.wire.sandbox import SandboxView


class Layers:
    """Layers over all nodes."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def list(self, caller: Caller, kind: LayerKind | None) -> list[LayerView]:
        """Layers that some node has, by kind and name, versions in the order of publication.

        Raises:
            PermissionDenied: the caller may not see images.
            Unavailable: no node answers.
        """
        caller.require_somewhere(Permission.IMAGE_READ)
        answers = await everywhere.gather(self._edges, lambda api: api.layers(kind))
        return sorted(_merged(view for views in answers for view in views), key=_place)

    async def show(self, caller: Caller, wanted: LayerQuery) -> LayerView:
        """One layer; without a version, the newest any node has.

        Raises:
            PermissionDenied: the caller may not see images.
            NotFound: there is none.
        """
        caller.require_somewhere(Permission.IMAGE_READ)
        answers = await everywhere.gather(
            self._edges, lambda api: api.layer(wanted.kind, wanted.name)
        )
        return max(_merged(answers), key=lambda view: view.created_at)

    async def remove(self, caller: Caller, wanted: LayerQuery) -> None:
        """Forget a version everywhere.

        Raises:
            PermissionDenied: the caller may not change images.
            NotFound: no node has it. Conflict: a sandbox uses it. Unavailable: a node is away.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)

        async def check_unused(api: EdgeApi) -> None:
            await api.layer(wanted.kind, wanted.name)  # it has it at all
            users = [
                view.id
                for view in await api.list_sandboxes(ListFilter())
                if _stands_on(view, wanted)
            ]
            if users:
                raise Conflict(
                    f"{wanted.kind} {wanted.name} is used by {', '.join(users[:5])}",
                    users=len(users),
                    advice="stop these sandboxes first, or leave the version and publish a newer one",
                )

        def take_away(api: EdgeApi) -> Awaitable[None]:
            return api.remove_layer(wanted.kind, wanted.name)

        await everywhere.remove(self._edges, take_away, check_unused)

    def publish(
        self, caller: Caller, wanted: PublishQuery, archive: AsyncIterator[bytes]
    ) -> AsyncIterator[LayerEvent]:
        """Publish a version from a tar as it streams in: it can be read once, so on one node.

        The others have it from the store.

        Raises:
            PermissionDenied: the caller may not change images. Unavailable: no node is known.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)
        api = everywhere.present(self._edges)[0].api
        return api.publish_layer(wanted.kind, wanted.name, wanted.description, archive)


def _merged(views: Iterable[LayerView]) -> list[LayerView]:
    """One view of each version; its users on all nodes together."""
    found: dict[tuple[LayerKind, str], LayerView] = {}
    for view in views:
        key = view.kind, view.name
        if known := found.get(key):
            found[key] = replace(known, used_by=known.used_by + view.used_by)
        else:
            found[key] = view
    return list(found.values())


def _place(view: LayerView) -> tuple[str, str, float, str]:
    name, _, version = view.name.rpartition(":")
    return view.kind, name, view.created_at, version


def _stands_on(view: SandboxView, wanted: LayerQuery) -> bool:
    names = [view.workspace] if wanted.kind == "workspace" else view.toolkits
    return view.state not in FINAL and wanted.name in names
