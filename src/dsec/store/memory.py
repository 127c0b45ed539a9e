"""The store's twin in memory: same interfaces, same contract test, nothing kept."""

from __future__ import annotations

from dataclasses import replace

from dsec.base.clock import Clock
from dsec.base.errors import NotFound
from dsec.base.ids import PrincipalId, ProjectId, SandboxId
from dsec.iam.principals import KeyFacts, Principal
from dsec.iam.projects import Project, ProjectTree
from dsec.store.records import Claim


class MemoryDirectory:
    """Facts for decisions, in dictionaries."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._projects: dict[ProjectId, ProjectId | None] = {}
        self._principals: dict[PrincipalId, Principal] = {}
        self._keys: dict[bytes, KeyFacts] = {}

    async def find_key(self, digest: bytes) -> KeyFacts | None:
        """What is known about the key with that digest."""
        return self._keys.get(digest)

    async def tree(self) -> ProjectTree:
        """All projects."""
        return ProjectTree(self._projects)

    async def add_project(self, project: Project) -> None:
        """Add a project. Raises NotFound if its parent does not exist."""
        if project.parent is not None and project.parent not in self._projects:
            raise NotFound(f"no project {project.parent!r}", kind="project")
        self._projects.setdefault(project.id, project.parent)

    async def add_principal(self, principal: Principal) -> None:
        """Add a principal with its grants. Raises NotFound if its project does not exist."""
        if principal.project not in self._projects:
            raise NotFound(f"no project {principal.project!r}", kind="project")
        self._principals.setdefault(principal.id, principal)

    async def add_key(
        self, digest: bytes, principal: PrincipalId, name: str, expires_at: float | None = None
    ) -> None:
        """Add a key. Raises NotFound if its principal does not exist."""
        del name
        if principal not in self._principals:
            raise NotFound(f"no principal {principal!r}", kind="principal")
        self._keys.setdefault(digest, KeyFacts(self._principals[principal], expires_at))

    async def revoke_key(self, digest: bytes) -> None:
        """Make a key useless from now on. Raises NotFound."""
        if digest not in self._keys:
            raise NotFound("no such key", kind="key")
        self._keys[digest] = replace(self._keys[digest], revoked_at=self._clock.now())


class MemoryClaims:
    """Which sandbox an idempotency key stands for, in a dictionary."""

    def __init__(self, clock: Clock, *, shared: bool = False) -> None:
        self.shared = shared
        self._clock = clock
        self._claims: dict[tuple[ProjectId, str], tuple[Claim, float]] = {}

    async def find(self, project: ProjectId, key: str) -> Claim | None:
        """The claim under a key."""
        found = self._claims.get((project, key))
        return found[0] if found else None

    async def claim(self, project: ProjectId, key: str, wanted: Claim) -> Claim:
        """Claim a key; the claim that holds is the answer, be it an earlier one."""
        return self._claims.setdefault((project, key), (wanted, self._clock.now()))[0]

    async def move(
        self, project: ProjectId, key: str, refused: SandboxId, to: SandboxId
    ) -> Claim | None:
        """Point a key that is not settled from a refused id to another; the claim that holds."""
        found = await self.find(project, key)
        if found and found.sandbox == refused and not found.settled:
            self._replace(project, key, replace(found, sandbox=to))
        return await self.find(project, key)

    async def settle(self, project: ProjectId, key: str, sandbox: SandboxId) -> bool:
        """Fix a key to its sandbox for good; False if it was moved elsewhere meanwhile."""
        found = await self.find(project, key)
        if found is None or found.sandbox != sandbox:
            return False
        self._replace(project, key, replace(found, settled=True))
        return True

    async def forget_before(self, moment: float) -> int:
        """Drop claims older than a moment, in seconds since the epoch; how many."""
        old = [place for place, (_, created) in self._claims.items() if created < moment]
        for place in old:
            del self._claims[place]
        return len(old)

    def _replace(self, project: ProjectId, key: str, claim: Claim) -> None:
        self._claims[project, key] = (claim, self._claims[project, key][1])
