"""Who asks, and the questions put to `dsec.iam` with the facts at hand."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.base.ids import ProjectId
from dsec.iam.decide import decide, permissions_in
from dsec.iam.permissions import Permission
from dsec.iam.principals import Principal
from dsec.iam.projects import ProjectTree


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated principal, with the projects as they stood when its key was checked."""

    principal: Principal
    tree: ProjectTree

    @property
    def project(self) -> ProjectId:
        """Where what the caller creates goes."""
        return self.principal.project

    def require(self, permission: Permission, project: ProjectId, what: str = "project") -> None:
        """Allow, or raise.

        Raises:
            NotFound: not visible to the caller.
            PermissionDenied: visible, but not allowed.
        """
        decide(self.principal, permission, project, self.tree, what)

    def require_somewhere(self, permission: Permission) -> None:
        """Allow what concerns no project (nodes, images): the right must be held at home.

        Raises:
            NotFound, PermissionDenied: as `require`.
        """
        self.require(permission, self.project)

    def visible(self, permission: Permission) -> frozenset[ProjectId]:
        """Projects in which the caller holds a right."""
        return frozenset(
            project
            for grant in self.principal.grants
            for project in self.tree.below(grant.project)
            if permission in (permissions_in(self.principal, project, self.tree) or ())
        )
