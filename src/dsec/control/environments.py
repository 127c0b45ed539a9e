"""Environments: what an image, a workspace and toolkits make together, looked at from outside."""

from __future__ import annotations

from dsec.base.errors import NotFound, PermissionDenied
from dsec.base.snapshots import project_in
from dsec.control import everywhere
from dsec.control.access import Caller
from dsec.control.edges import Edges
from dsec.control.snapshots import require_image
from dsec.iam.permissions import Permission
from dsec.wire.environment_queries import TraceQuery
from dsec.wire.public_v1 import LintReport, LintRequest, TraceView


class Environments:
    """Environments over all nodes."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def lint(self, caller: Caller, request: LintRequest) -> LintReport:
        """Look an environment over, on the first node that has it.

        Its rules search the contents of files: that is for those who could start a sandbox and read
        them there.

        Raises:
            PermissionDenied: the caller may not create sandboxes, or not restore that snapshot.
            NotFound: no node has the image or a layer.
        """
        caller.require(Permission.SANDBOX_CREATE, caller.project)
        require_image(caller, request.image)
        await self._check_residue(caller, request.image)
        return await everywhere.first(self._edges, lambda api: api.lint(request))

    async def _check_residue(self, caller: Caller, image: str) -> None:
        """As restoring does: what a build left behind in a snapshot is its packer's alone."""
        project = project_in(image)
        if not project:
            return
        answers = await everywhere.gather(self._edges, lambda api: api.snapshots(project))
        found = [view for views in answers for view in views if view.image == image]
        if not found:
            raise NotFound(f"no image {image}", kind="image")
        if any(not view.cleaned and view.packed_by != caller.principal.id for view in found):
            raise PermissionDenied(
                f"{image} was packed with what its build left behind: only who packed it may lint it"
            )

    async def trace(self, caller: Caller, wanted: TraceQuery) -> TraceView:
        """What a run read of an environment; the latest recording any node has.

        Raises:
            PermissionDenied: the caller may not see images.
            NotFound: none was recorded.
        """
        caller.require_somewhere(Permission.IMAGE_READ)
        environment = wanted.environment()
        require_image(caller, environment.image)
        found = await everywhere.gather(
            self._edges, lambda api: api.trace(environment, wanted.trace)
        )
        return max(found, key=lambda view: view.recorded_at)
