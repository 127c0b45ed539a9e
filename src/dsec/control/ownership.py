"""Whose sandbox is it: the edge says once, a bounded memory says from then on."""

from __future__ import annotations

from collections import OrderedDict

import anyio

from dsec.base.errors import Unavailable
from dsec.base.ids import ProjectId, SandboxId
from dsec.control.access import Caller
from dsec.control.edges import Edges
from dsec.iam.permissions import Permission
from dsec.wire.sandbox import SandboxView

REMEMBERED = 65536
LOOK_TIMEOUT_S = 5.0


class Ownership:
    """Projects of sandboxes. A sandbox never changes project, so what is learnt stays true."""

    def __init__(self, edges: Edges, remembered: int = REMEMBERED) -> None:
        self._edges = edges
        self._remembered = remembered
        self._projects: OrderedDict[SandboxId, ProjectId] = OrderedDict()

    def learn(self, sandbox: SandboxId, project: ProjectId) -> None:
        """Remember a sandbox's project, forgetting the one least recently asked for."""
        self._projects[sandbox] = project
        if len(self._projects) > self._remembered:
            self._projects.popitem(last=False)

    def knows(self, sandbox: SandboxId) -> bool:
        """Whether that sandbox is known to have been made."""
        return sandbox in self._projects

    def recall(self, sandbox: SandboxId) -> ProjectId | None:
        """The project of a sandbox, if its edge has told this process and it is remembered."""
        return self._projects.get(sandbox)

    async def project_of(self, sandbox: SandboxId) -> ProjectId:
        """The project a sandbox belongs to.

        Raises:
            NotFound: there is no such sandbox. Unavailable: its edge is away.
        """
        project = self._projects.get(sandbox)
        if project is not None:
            self._projects.move_to_end(sandbox)
            return project
        return ProjectId((await self.look(sandbox)).project)

    async def look(self, sandbox: SandboxId) -> SandboxView:
        """A sandbox as it stands now.

        Raises:
            NotFound: there is no such sandbox. Unavailable: its edge is away.
        """
        edge = self._edges.of(sandbox)
        try:
            with anyio.fail_after(LOOK_TIMEOUT_S):
                view = await edge.api.get(sandbox)
        except TimeoutError:
            raise Unavailable(f"the edge of {sandbox} does not answer") from None
        self.learn(sandbox, ProjectId(view.project))
        return view

    async def require(self, caller: Caller, permission: Permission, sandbox: SandboxId) -> None:
        """Allow, or raise.

        Raises:
            NotFound: there is no such sandbox, or not for this caller: the answers are alike.
            PermissionDenied: the caller sees it but may not do this. Unavailable: its edge is away.
        """
        project = await self.project_of(sandbox)
        caller.require(permission, project, f"sandbox {sandbox}")
