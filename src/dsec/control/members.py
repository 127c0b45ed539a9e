"""The sandboxes of a job: find them on all nodes, and do one thing to each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

import anyio
import anyio.abc

from dsec.base.errors import DeadlineExceeded, DsecError, NotFound, SandboxGone
from dsec.base.ids import NodeId, ProjectId, SandboxId, sandbox_id
from dsec.base.states import FINAL, SandboxState, StopReason
from dsec.control.edges import Edges
from dsec.control.listing import ask_all
from dsec.kit.http import error_body
from dsec.wire.edge_v1 import EdgeApi, ListFilter, PauseOrder, StopOrder
from dsec.wire.public_v1 import JobItem
from dsec.wire.sandbox import SandboxView

Verb = Literal["pause", "resume", "reap"]

AT_ONCE = 32
"""Sandboxes of one job in work at a time: a job of thousands must not starve single requests."""
ACT_TIMEOUT_S = 300.0
LIVE = [state.value for state in SandboxState if state not in FINAL]


class Order(NamedTuple):
    """One thing to be done to a sandbox."""

    sandbox: SandboxId
    verb: Verb
    reason: StopReason = StopReason.REAPED
    """Why it is over, if it is to be stopped."""
    why: str = ""
    """The same in words; of a pause, why only an explicit resume ends it."""


@dataclass(frozen=True, slots=True)
class Members:
    """Sandboxes that are not over, and the nodes whose are missing from them."""

    views: list[SandboxView]
    silent: list[NodeId]
    unheard: int
    """Nodes that have not said yet what they are called."""

    @property
    def complete(self) -> bool:
        """Whether all nodes have answered."""
        return not self.silent and not self.unheard


async def find_members(edges: Edges, project: ProjectId, job: str = "") -> Members:
    """The sandboxes of one job of a project, or of any.

    Raises:
        Unavailable: no node answers.
    """
    wanted = ListFilter(project=project, job=job, states=LIVE)
    views, silent = await ask_all(edges, wanted)
    mine = [view for view in views if view.project == project and (view.job == job or not job)]
    return Members(mine, silent, edges.unheard())


@asynccontextmanager
async def carried_out(
    edges: Edges, orders: Sequence[Order], first: Sequence[JobItem] = ()
) -> AsyncIterator[AsyncIterator[JobItem]]:
    """Carry out orders, some at a time; within the context, items come as each is done.

    Leaving the context early gives up those not asked for yet.

    Args:
        edges: the fleet.
        orders: what to do to which sandbox.
        first: items that are known already.
    """
    pending = iter(orders)
    # A slow reader holds the workers up.
    send, receive = anyio.create_memory_object_stream[JobItem](AT_ONCE)

    async def worker(done: anyio.abc.ObjectSendStream[JobItem]) -> None:
        async with done:
            for order in pending:
                await done.send(await _item(edges, order))

    async def known(done: anyio.abc.ObjectSendStream[JobItem]) -> None:
        async with done:
            for item in first:
                await done.send(item)

    async with anyio.create_task_group() as group, receive:
        async with send:
            group.start_soon(known, send.clone())
            for _ in range(min(AT_ONCE, len(orders))):
                group.start_soon(worker, send.clone())
        yield receive
        group.cancel_scope.cancel()


def orders_for(views: Sequence[SandboxView], verb: Verb, by: str) -> list[Order]:
    """The same for all of them, as somebody asks."""
    if verb != "reap":
        return [Order(sandbox_id(view.id), verb) for view in views]
    return [Order(sandbox_id(view.id), verb, why=f"{whose(view)}: {by} asked") for view in views]


def whose(view: SandboxView) -> str:
    """The job and the epoch a sandbox is of, in words."""
    return f"epoch {view.epoch} of job {view.job}" if view.epoch else f"job {view.job}"


async def _item(edges: Edges, order: Order) -> JobItem:
    sandbox = order.sandbox
    try:
        api = edges.of(sandbox).api
        with anyio.fail_after(ACT_TIMEOUT_S):
            return JobItem(id=sandbox, sandbox=await _act(api, order))
    except TimeoutError:
        late = DeadlineExceeded(f"{order.verb} of {sandbox} took over {ACT_TIMEOUT_S:.0f} s")
        return JobItem(id=sandbox, error=error_body(late).error)
    except DsecError as exc:
        return JobItem(id=sandbox, error=error_body(exc).error)


async def _act(api: EdgeApi, order: Order) -> SandboxView | None:
    sandbox = order.sandbox
    try:
        match order.verb:
            case "pause":
                return await api.pause(sandbox, PauseOrder(held=order.why))
            case "resume":
                return await api.resume(sandbox)
            case "reap":
                return await api.stop(sandbox, StopOrder(reason=order.reason, detail=order.why))
            case _:
                assert_never(order.verb)
    except (SandboxGone, NotFound) as exc:
        return await _over(api, sandbox, exc)


async def _over(api: EdgeApi, sandbox: SandboxId, refusal: DsecError) -> SandboxView | None:
    """It has ended meanwhile: nothing is left to be done to it; if it has not, what was said holds."""
    try:
        view = await api.get(sandbox)
    except NotFound:
        return None
    if view.state not in FINAL:
        raise refusal
    return view
