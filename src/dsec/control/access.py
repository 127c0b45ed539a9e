"""Who asks, and the questions put to `dsec.iam` with the facts at hand."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.base.errors import PermissionDenied
from dsec.base.ids import ProjectId
from dsec.iam.decide import decide, permissions_in
from dsec.iam.permissions import Permission
from dsec.iam.principals import Principal
from dsec.iam.projects import ROOT, ProjectTree


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
        """Allow a look at what all projects share (nodes, images): the right is needed at home.

        Raises:
            NotFound, PermissionDenied: as `require`.
        """
        self.require(permission, self.project)

    def require_everywhere(self, permission: Permission) -> None:
        """Allow what concerns every project: the right must be held in the root.

        Raises:
            PermissionDenied: it is not.
        """
        if permission not in (permissions_in(self.principal, ROOT, self.tree) or ()):
            raise PermissionDenied(
                f"{self.principal.name} lacks {permission} in project {ROOT}: all projects share it",
                permission=permission.value,
            )

    def visible(self, permission: Permission) -> frozenset[ProjectId]:
        """Projects in which the caller holds a right."""
        return frozenset(
            project
            for grant in self.principal.grants
            for project in self.tree.below(grant.project)
            if permission in (permissions_in(self.principal, project, self.tree) or ())
        )
