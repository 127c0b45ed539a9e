"""The decision: may this principal do this in that project?"""

from __future__ import annotations

from dsec.base.errors import NotFound, PermissionDenied
from dsec.base.ids import ProjectId
from dsec.iam.permissions import Permission
from dsec.iam.principals import Principal
from dsec.iam.projects import ProjectTree


def permissions_in(
    principal: Principal, project: ProjectId, tree: ProjectTree
) -> frozenset[Permission] | None:
    """What a principal may do in a project; None if it cannot even see that the project exists."""
    chain = frozenset(tree.chain(project))
    granted = [grant.permissions for grant in principal.grants if grant.project in chain]
    return frozenset[Permission]().union(*granted) if granted else None


def decide(
    principal: Principal,
    permission: Permission,
    project: ProjectId,
    tree: ProjectTree,
    what: str = "project",
) -> None:
    """Allow, or raise.

    Args:
        principal: who asks.
        permission: for what.
        project: where the thing asked about lives.
        tree: all projects.
        what: names the thing in the refusal; the text is the same whether it does not exist or
            lives in a project the principal has no part in.

    Raises:
        NotFound: not visible to the principal.
        PermissionDenied: visible, but not allowed.
    """
    allowed = permissions_in(principal, project, tree)
    if allowed is None:
        raise NotFound(f"no {what}", kind=what.split(" ", 1)[0])
    if permission not in allowed:
        raise PermissionDenied(f"{principal.name} lacks {permission}", permission=permission.value)
