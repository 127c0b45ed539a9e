"""What a store of principals, projects and keys must offer. Implemented in `dsec.store`."""

from __future__ import annotations

from typing import Protocol

from dsec.base.ids import PrincipalId
from dsec.iam.principals import KeyFacts, Principal
from dsec.iam.projects import Project, ProjectTree


class Directory(Protocol):
    """Facts that decisions are made from; `add_*` is harmless twice."""

    async def find_key(self, digest: bytes) -> KeyFacts | None:
        """What is known about the key with that digest, revoked and expired ones included."""
        ...

    async def tree(self) -> ProjectTree:
        """All projects."""
        ...

    async def add_project(self, project: Project) -> None:
        """Add a project. Raises NotFound if its parent does not exist."""
        ...

    async def add_principal(self, principal: Principal) -> None:
        """Add a principal with its grants. Raises NotFound if its project does not exist."""
        ...

    async def add_key(
        self, digest: bytes, principal: PrincipalId, name: str, expires_at: float | None = None
    ) -> None:
        """Add a key. Raises NotFound if its principal does not exist."""
        ...

    async def revoke_key(self, digest: bytes) -> None:
        """Make a key useless from now on. Raises NotFound."""
        ...
