"""What the store hands out that no room below it has a word for."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.base.ids import PrincipalId, ProjectId, SandboxId
from dsec.wire.public_v1 import LeasePolicy


@dataclass(frozen=True, slots=True)
class Claim:
    """An idempotency key and the sandbox it stands for.

    `digest` is of the request first sent under the key. Once `settled`, the key stands for this
    sandbox for good; before that it may be moved to another node, under another id.
    """

    sandbox: SandboxId
    digest: bytes
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What whoever takes or renews a lease wants of it."""

    holder: PrincipalId
    ttl_s: float
    expires_at: float
    on_lapse: LeasePolicy
    on_superseded: LeasePolicy
    at: float
    """Now."""
    key: str = ""
    """Idempotency key of a taking; empty = each is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who a job belongs to, and what is still to be done about those it belonged to before.

    Times are seconds since the epoch. A lease lapses when that has been found and written down, not
    by itself: whoever renews in time after all has not lost it.
    """

    project: ProjectId
    job: str
    epoch: int
    """From 1; each taking adds one, so that no two holders ever have the same."""
    holder: PrincipalId
    ttl_s: float
    expires_at: float | None
    """None = it was given back; the row stays, for its epoch."""
    on_lapse: LeasePolicy
    on_superseded: LeasePolicy
    created_at: float
    taken_at: float
    updated_at: float
    superseding: bool
    """Sandboxes of older epochs may still have to be seen to."""
    lapsed_at: float | None
    lapsing: bool
    """It has lapsed, and its own sandboxes may still have to be seen to."""
    due_at: float | None
    """When it is to be looked at next; None = there is nothing to wait for."""
    key: str
    """It was taken under."""
    version: int
    """Rises with each change."""


def first_lease(project: ProjectId, job: str, terms: Terms) -> Lease:
    """The lease of a job that never had one."""
    return Lease(
        project=project,
        job=job,
        epoch=1,
        holder=terms.holder,
        ttl_s=terms.ttl_s,
        expires_at=terms.expires_at,
        on_lapse=terms.on_lapse,
        on_superseded=terms.on_superseded,
        created_at=terms.at,
        taken_at=terms.at,
        updated_at=terms.at,
        superseding=False,
        lapsed_at=None,
        lapsing=False,
        due_at=terms.expires_at,
        key=terms.key,
        version=1,
    )
