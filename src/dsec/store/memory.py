"""The store's twin in memory: same interfaces, same contract test, nothing kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dsec.base.clock import Clock
from dsec.base.errors import NotFound
from dsec.base.ids import PrincipalId, ProjectId, SandboxId
from dsec.iam.principals import KeyFacts, Principal
from dsec.iam.projects import Project, ProjectTree
from dsec.store.records import Claim, Lease, Terms, first_lease


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


class MemoryLeases:
    """Leases by project and job, in a dictionary."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self._leases: dict[tuple[ProjectId, str], Lease] = {}

    async def find(self, project: ProjectId, job: str) -> Lease | None:
        """The lease of a job, in force or not."""
        return self._leases.get((project, job))

    async def of_project(self, project: ProjectId) -> list[Lease]:
        """All leases of a project, in force or not, by job."""
        found = [lease for lease in self._leases.values() if lease.project == project]
        return sorted(found, key=lambda lease: lease.job)

    async def take(self, project: ProjectId, job: str, terms: Terms) -> Lease:
        """Begin the next epoch, whoever holds the one before; under its own key it has begun."""
        lease = first_lease(project, job, terms)
        if before := self._leases.get((project, job)):
            if terms.key and before.key == terms.key:
                return before
            lease = replace(
                lease,
                epoch=before.epoch + 1,
                created_at=before.created_at,
                superseding=True,
                due_at=terms.at,
                version=before.version + 1,
            )
        self._leases[project, job] = lease
        return lease

    async def renew(self, project: ProjectId, job: str, epoch: int, terms: Terms) -> Lease | None:
        """Hold an epoch for longer; None if it is not held any more, or never was."""
        held = self._held(project, job, epoch)
        if held is None:
            return None
        return self._change(
            held,
            holder=terms.holder,
            ttl_s=terms.ttl_s,
            expires_at=terms.expires_at,
            on_lapse=terms.on_lapse,
            on_superseded=terms.on_superseded,
            updated_at=terms.at,
            due_at=held.due_at if held.superseding else terms.expires_at,
            lapsed_at=None,
            lapsing=False,
        )

    async def release(self, project: ProjectId, job: str, epoch: int, at: float) -> bool:
        """Give an epoch back; False if it is not held any more, or never was."""
        held = self._held(project, job, epoch)
        if held is None:
            return False
        self._change(
            held,
            expires_at=None,
            updated_at=at,
            due_at=held.due_at if held.superseding else None,
            lapsed_at=None,
            lapsing=False,
        )
        return True

    async def due(self, moment: float) -> list[Lease]:
        """Leases to be looked at by then, the longest due first."""
        found = [(at, lease) for at, lease in self._due() if at <= moment]
        return [lease for _, lease in sorted(found, key=lambda pair: pair[0])]

    async def nearest(self, after: float) -> float | None:
        """When the next one is due after that moment; None = none is."""
        return min((at for at, _ in self._due() if at > after), default=None)

    async def replace(self, seen: Lease, wanted: Lease) -> Lease | None:
        """Write a lease down anew; None if it has changed since it was seen."""
        now = self._leases.get((seen.project, seen.job))
        if now is None or now.version != seen.version:
            return None
        written = replace(wanted, version=seen.version + 1)
        self._leases[seen.project, seen.job] = written
        return written

    async def forget_before(self, moment: float) -> int:
        """Drop leases that nobody has held since a moment; how many."""
        old = [
            place
            for place, lease in self._leases.items()
            if lease.updated_at < moment
            and lease.due_at is None
            and (lease.expires_at is None or lease.lapsed_at is not None)
        ]
        for place in old:
            del self._leases[place]
        return len(old)

    def _held(self, project: ProjectId, job: str, epoch: int) -> Lease | None:
        lease = self._leases.get((project, job))
        if lease is None or lease.epoch != epoch or lease.expires_at is None:
            return None
        return None if lease.lapsed_at is not None and lease.on_lapse == "reap" else lease

    def _change(self, lease: Lease, **values: Any) -> Lease:
        changed = replace(lease, version=lease.version + 1, **values)
        self._leases[lease.project, lease.job] = changed
        return changed

    def _due(self) -> list[tuple[float, Lease]]:
        return [(x.due_at, x) for x in self._leases.values() if x.due_at is not None]
