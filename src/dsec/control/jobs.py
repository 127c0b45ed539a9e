"""Jobs: everything a run has in sandboxes, seen and moved as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dsec.base.errors import NotFound, Unavailable
from dsec.base.ids import NodeId, ProjectId
from dsec.base.states import SandboxState
from dsec.control.access import Caller
from dsec.control.edges import Edges
from dsec.control.leases import LeaseBook
from dsec.control.members import Members, Verb, carried_out, find_members, orders_for
from dsec.iam.permissions import Permission
from dsec.kit.http import error_body
from dsec.store.records import Lease
from dsec.wire.public_v1 import JobItem, JobView
from dsec.wire.sandbox import SandboxView

RIGHTS: dict[Verb, Permission] = {
    "pause": Permission.SANDBOX_OPERATE,
    "resume": Permission.SANDBOX_OPERATE,
    "reap": Permission.SANDBOX_STOP,
}


@dataclass(frozen=True, slots=True)
class Listed:
    """Jobs, and the nodes that did not answer: their sandboxes are not counted."""

    jobs: list[JobView]
    silent: list[NodeId]


class Jobs:
    """The use cases; all of them in the caller's own project."""

    def __init__(self, edges: Edges, book: LeaseBook) -> None:
        self._edges = edges
        self._book = book

    async def list(self, caller: Caller) -> Listed:
        """Jobs that have a lease or sandboxes, by name.

        Raises:
            PermissionDenied: the caller may not see sandboxes. Unavailable: no node answers.
        """
        caller.require(Permission.SANDBOX_READ, caller.project)
        leases = {lease.job: lease for lease in await self._book.of_project(caller.project)}
        members = await find_members(self._edges, caller.project)
        views: dict[str, list[SandboxView]] = {job: [] for job in leases}
        for view in members.views:
            if view.job:
                views.setdefault(view.job, []).append(view)
        jobs = [job_view(caller.project, job, leases.get(job), views[job]) for job in sorted(views)]
        return Listed(jobs, members.silent)

    async def show(self, caller: Caller, job: str) -> Listed:
        """One of them.

        Raises:
            PermissionDenied: the caller may not see sandboxes.
            NotFound: it has neither lease nor sandboxes. Unavailable: no node answers.
        """
        caller.require(Permission.SANDBOX_READ, caller.project)
        members, lease = await self._look(caller.project, job)
        return Listed([job_view(caller.project, job, lease, members.views)], members.silent)

    @asynccontextmanager
    async def move(
        self, caller: Caller, job: str, verb: Verb
    ) -> AsyncIterator[AsyncIterator[JobItem]]:
        """Pause, resume or reap all that it has; within the context, items come as each is done.

        A node that does not answer is an item without a sandbox's id. One that ends meanwhile is
        none of a failure.

        Raises:
            PermissionDenied: the caller may not do this.
            NotFound: it has neither lease nor sandboxes. Unavailable: no node answers.
        """
        caller.require(RIGHTS[verb], caller.project)
        members, _ = await self._look(caller.project, job)
        orders = orders_for(members.views, verb, caller.principal.id)
        async with carried_out(self._edges, orders, _missing(members)) as items:
            yield items

    async def _look(self, project: ProjectId, job: str) -> tuple[Members, Lease | None]:
        lease = await self._book.find(project, job)
        members = await find_members(self._edges, project, job)
        if lease is None and not members.views and members.complete:
            raise NotFound(f"no job {job}", kind="job")
        return members, lease


def job_view(
    project: ProjectId, job: str, lease: Lease | None, views: list[SandboxView]
) -> JobView:
    """A job as others see it."""
    states = Counter(view.state for view in views)
    view = JobView(
        job=job,
        project=project,
        running=states[SandboxState.RUNNING],
        paused=states[SandboxState.PAUSED],
        sandboxes=len(views),
    )
    if lease is not None:
        view.epoch, view.expires_at = lease.epoch, lease.expires_at
        view.lapsed = lease.lapsed_at is not None
        view.on_lapse, view.on_superseded = lease.on_lapse, lease.on_superseded
    return view


def _missing(members: Members) -> list[JobItem]:
    """What is not known of a job because nodes do not answer."""
    away = [Unavailable(f"node {node} does not answer", node=node) for node in members.silent]
    if members.unheard:  # in one item: they have no names that would tell several apart
        said = f"nodes that have not been heard of yet: {members.unheard}"
        away.append(Unavailable(said, nodes=members.unheard))
    return [JobItem(id="", error=error_body(exc).error) for exc in away]
