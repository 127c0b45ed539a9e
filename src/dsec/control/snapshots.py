"""Snapshots: images made of sandboxes, each in the project of its sandbox.

Taking one is an operation on its sandbox and passes through to the edge; here is what is done to
those that exist. With several nodes and no shared store, each has its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from dsec.base.errors import Conflict, NotFound
from dsec.base.ids import ProjectId
from dsec.base.snapshots import project_in
from dsec.base.states import FINAL
from dsec.control import everywhere
from dsec.control.access import Caller
from dsec.control.edges import Edges
from dsec.iam.permissions import Permission
from dsec.wire.edge_v1 import EdgeApi, ListFilter
from dsec.wire.sandbox import DiffEntry, SnapshotView


class Snapshots:
    """Snapshots over all nodes; those of the caller's project."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def get(self, caller: Caller, name: str) -> SnapshotView:
        """One of them.

        Raises:
            PermissionDenied: the caller may not see sandboxes.
            NotFound: there is none. Unavailable: no node answers.
        """
        found = [view for view in await self.list(caller) if view.name == name]
        if not found:
            raise NotFound(f"no snapshot {name!r} in project {caller.project}", kind="snapshot")
        return min(found, key=lambda view: view.conflict)

    async def diff(self, caller: Caller, name: str) -> list[DiffEntry]:
        """What one has changed, by path.

        Raises:
            PermissionDenied: the caller may not operate sandboxes.
            NotFound: there is none. Unavailable: no node answers.
        """
        caller.require(Permission.SANDBOX_OPERATE, caller.project)
        project = caller.project
        return await everywhere.first(self._edges, lambda api: api.snapshot_diff(project, name))

    async def remove(self, caller: Caller, name: str) -> None:
        """Forget one everywhere.

        Raises:
            PermissionDenied: the caller may not operate sandboxes.
            NotFound: no node has it. Conflict: a sandbox stands on it. Unavailable: a node is away.
        """
        caller.require(Permission.SANDBOX_OPERATE, caller.project)
        project = caller.project
        image = (await self.get(caller, name)).image

        async def check_unused(api: EdgeApi) -> None:
            known = await api.list_sandboxes(ListFilter())  # also of projects below
            users = sorted(s.id for s in known if s.image == image and s.state not in FINAL)
            if users:
                raise Conflict(f"snapshot {name} is used by {users[0]}", users=len(users))

        await everywhere.remove(
            self._edges, lambda api: api.remove_snapshot(project, name), check_unused
        )

    async def list(self, caller: Caller) -> list[SnapshotView]:
        """Those that some node has, newest first.

        Raises:
            PermissionDenied: the caller may not see sandboxes. Unavailable: no node answers.
        """
        caller.require(Permission.SANDBOX_READ, caller.project)
        project = caller.project
        answers = await everywhere.gather(self._edges, lambda api: api.snapshots(project))
        found = _merged(view for views in answers for view in views)
        return sorted(found, key=lambda view: view.created_at, reverse=True)


def _merged(views: Iterable[SnapshotView]) -> list[SnapshotView]:
    """One view of each; whether any node has put it into the store."""
    found: dict[tuple[str, str], SnapshotView] = {}
    for view in views:
        key = view.name, view.digest if view.conflict else ""
        known = found.setdefault(key, view)
        if view.stored and not known.stored:
            found[key] = replace(known, stored=True)
    return list(found.values())


def require_image(caller: Caller, image: str) -> None:
    """Allow an image to be used: what is inside a snapshot is for those who may look into sandboxes.

    Raises:
        NotFound: it is a snapshot of a project the caller has no part in.
        PermissionDenied: the caller may not operate that project's sandboxes.
    """
    if project := project_in(image):
        caller.require(Permission.SANDBOX_OPERATE, ProjectId(project), f"image {image}")
