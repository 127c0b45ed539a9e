"""Leases: who a job's sandboxes belong to, so that nobody works for a trainer that is gone.

Whoever runs a job takes its lease and renews it. Taking it begins a new epoch: from then on nothing
is created under an older one. What becomes of sandboxes without a holder is `reaping.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, Detail, InvalidRequest
from dsec.base.ids import ProjectId, idempotency_key
from dsec.control.access import Caller
from dsec.control.forgetting import forget_hourly
from dsec.iam.permissions import Permission
from dsec.store.records import Lease, Terms
from dsec.wire.public_v1 import LeaseRequest
from dsec.wire.sandbox import SandboxSpec

KEPT_S = 90 * 86400.0
"""A job's epoch is remembered for this long after its last holder; then they begin at 1 again."""


class LeaseBook(Protocol):
    """Leases by project and job, as the store has them."""

    @property
    def shared(self) -> bool:
        """Whether other processes write there too, so that something may be due behind our back."""
        ...

    async def find(self, project: ProjectId, job: str) -> Lease | None:
        """The lease of a job, in force or not."""
        ...

    async def of_project(self, project: ProjectId) -> list[Lease]:
        """All leases of a project, in force or not, by job."""
        ...

    async def take(self, project: ProjectId, job: str, terms: Terms) -> Lease:
        """Begin the next epoch, whoever holds the one before; under its own key it has begun."""
        ...

    async def renew(self, project: ProjectId, job: str, epoch: int, terms: Terms) -> Lease | None:
        """Hold an epoch for longer; None if it is not held any more, or never was."""
        ...

    async def release(self, project: ProjectId, job: str, epoch: int, at: float) -> bool:
        """Give an epoch back; False if it is not held any more, or never was."""
        ...

    async def due(self, moment: float) -> list[Lease]:
        """Leases to be looked at by then, the longest due first."""
        ...

    async def nearest(self, after: float) -> float | None:
        """When the next one is due after that moment; None = none is."""
        ...

    async def replace(self, seen: Lease, wanted: Lease) -> Lease | None:
        """Write a lease down anew; None if it has changed since it was seen."""
        ...

    async def forget_before(self, moment: float) -> int:
        """Drop leases that nobody has held since a moment; how many."""
        ...


class Leases:
    """The use cases."""

    def __init__(self, book: LeaseBook, clock: Clock, expect: Callable[[float], None]) -> None:
        """Make them.

        Args:
            book: where leases are written down.
            clock: for when they expire.
            expect: told when one is due next, in seconds since the epoch.
        """
        self._book = book
        self._clock = clock
        self._expect = expect

    async def hold(self, caller: Caller, job: str, wanted: LeaseRequest, key: str = "") -> Lease:
        """Take a job's lease (epoch 0) or renew it.

        Args:
            caller: who asks; the job is one of the caller's project.
            job: its name.
            wanted: the epoch and its terms.
            key: the idempotency key: taken again under it, the lease is the same.

        Raises:
            PermissionDenied: the caller may not operate sandboxes.
            Conflict: the epoch is not held any more, or never was; `details` say which one is.
        """
        caller.require(Permission.SANDBOX_OPERATE, caller.project)
        terms = self._terms(caller, wanted, checked_key(key))
        if not wanted.epoch:
            lease = await self._book.take(caller.project, job, terms)
        else:
            renewed = await self._book.renew(caller.project, job, wanted.epoch, terms)
            lease = renewed or await self._refuse(caller.project, job, wanted.epoch)
        if lease.due_at is not None:
            self._expect(lease.due_at)
        return lease

    async def release(self, caller: Caller, job: str, epoch: int) -> None:
        """Give a job's lease back; its sandboxes go on, and nothing waits for a renewal.

        Raises:
            PermissionDenied: the caller may not operate sandboxes.
            Conflict: the epoch is another's by now, or has lapsed, or never was.
        """
        caller.require(Permission.SANDBOX_OPERATE, caller.project)
        if await self._book.release(caller.project, job, epoch, self._clock.now()):
            return
        lease = await self._book.find(caller.project, job)
        if lease is None or lease.epoch != epoch or lease.expires_at is not None:
            raise _not_held(lease, job, epoch)

    async def stamp(self, project: ProjectId, spec: SandboxSpec) -> SandboxSpec:
        """A specification with the epoch in force.

        Raises:
            InvalidRequest: an epoch of no job.
            Conflict: its epoch is not the one in force; nothing may be started under it.
        """
        if spec.job is None:
            if spec.epoch:
                raise InvalidRequest("epoch: only a sandbox of a job has one", place="epoch")
            return spec
        epoch = await self.epoch_in_force(project, spec.job, spec.epoch)
        return msgspec.structs.replace(spec, epoch=epoch)

    async def epoch_in_force(self, project: ProjectId, job: str, epoch: int) -> int:
        """The epoch under which something may be started for a job that names this one, or none (0).

        Raises:
            Conflict: it is not in force; nothing may be started under it.
        """
        lease = await self._book.find(project, job)
        if not epoch and (lease is None or lease.expires_at is None):
            return 0
        if lease is None or not _in_force(lease, epoch or lease.epoch):
            raise _not_held(lease, job, epoch)
        return lease.epoch

    async def forget_old(self) -> None:
        """Drop leases nobody has held for long, once an hour, for ever."""
        await forget_hourly("old leases", self._book.forget_before, self._clock, KEPT_S)

    def _terms(self, caller: Caller, wanted: LeaseRequest, key: str) -> Terms:
        now = self._clock.now()
        return Terms(
            holder=caller.principal.id,
            ttl_s=wanted.ttl_s,
            expires_at=now + wanted.ttl_s,
            on_lapse=wanted.on_lapse,
            on_superseded=wanted.on_superseded,
            at=now,
            key=key,
        )

    async def _refuse(self, project: ProjectId, job: str, epoch: int) -> Lease:
        raise _not_held(await self._book.find(project, job), job, epoch)


def checked_key(key: str) -> str:
    """An idempotency key, or "" for none.

    Raises:
        InvalidRequest: it is too long.
    """
    return idempotency_key(key) if key else ""


def _in_force(lease: Lease, epoch: int) -> bool:
    return lease.epoch == epoch and lease.expires_at is not None and lease.lapsed_at is None


def _not_held(lease: Lease | None, job: str, epoch: int) -> Conflict:
    """Why nobody may act under an epoch, and who could."""
    if lease is None:
        why = f"job {job} has no lease"
        return Conflict(f"{why}: epoch {epoch} is unknown", kind="lease", reason="unknown")
    held: dict[str, Detail] = {"kind": "lease", "epoch": lease.epoch, "holder": lease.holder}
    if epoch and epoch != lease.epoch:
        reason = "superseded" if epoch < lease.epoch else "unknown"
        said = f"epoch {epoch} of job {job} is {reason}: {lease.holder} has epoch {lease.epoch}"
        return Conflict(said, reason=reason, **held)
    reason = "released" if lease.expires_at is None else "lapsed"
    what = "take it anew" if reason == "released" or lease.on_lapse == "reap" else "renew it"
    said = f"epoch {lease.epoch} of job {job} is {reason}: {what} first"
    return Conflict(said, reason=reason, **held)
