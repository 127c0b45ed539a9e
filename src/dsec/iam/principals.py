"""Facts about callers: who they are and what was granted to them where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsec.base.ids import PrincipalId, ProjectId
from dsec.iam.permissions import Permission

PrincipalKind = Literal["person", "service", "agent"]


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights in a project and all projects below it."""

    project: ProjectId
    permissions: frozenset[Permission]


@dataclass(frozen=True, slots=True)
class Principal:
    """A person, service or agent: one model for all."""

    id: PrincipalId
    name: str
    kind: PrincipalKind
    project: ProjectId
    """Where what it creates goes."""
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """A key as it is stored, with the principal it speaks for."""

    principal: Principal
    expires_at: float | None = None
    """Seconds since the epoch; None = never."""
    revoked_at: float | None = None

    def usable(self, now: float) -> bool:
        """Whether it opens anything at a moment, in seconds since the epoch."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)
