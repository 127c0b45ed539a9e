"""What becomes of sandboxes whose epoch nobody holds any more: stopped or paused, as the lease says.

One task sleeps until the next lease is due. What is owed is in the store before it is done, and stays
there until a look begun after the last creation under that epoch can have reached its node has found
nothing left to do on any node: so a crash at any moment loses nothing. Each order is harmless twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Set as AbstractSet
from dataclasses import replace

import anyio
import anyio.abc

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, Unsupported
from dsec.base.ids import ProjectId, sandbox_id
from dsec.base.states import SandboxState, StopReason
from dsec.control.edges import Edges
from dsec.control.leases import LeaseBook
from dsec.control.members import Order, carried_out, find_members, whose
from dsec.control.patience import Patience
from dsec.control.sandboxes import CREATE_TIMEOUT_S
from dsec.store.records import Lease
from dsec.wire.public_v1 import JobItem, LeasePolicy
from dsec.wire.sandbox import SandboxView

logger = logging.getLogger("dsec.control")

LATE_S = CREATE_TIMEOUT_S + 30.0
"""A creation that was let in before may reach its node this much later."""
AGAIN_S, AGAIN_AT_MOST_S = 5.0, 300.0
"""Between two looks at what is owed; they grow with its age."""
READ_AGAIN_S, READ_IDLE_S = 5.0, 60.0
"""Where others write leases too: how soon theirs are seen, and how soon the first of all."""
RETRY_S = 5.0
"""After a failure of the store."""
JOBS_AT_ONCE = 8

Place = tuple[ProjectId, str]
Paused = tuple[str, float]
"""A sandbox, and since when what it was paused for is owed."""


class Reaper:
    """The task."""

    def __init__(self, edges: Edges, book: LeaseBook, clock: Clock) -> None:
        self._edges = edges
        self._book = book
        self._clock = clock
        self._patience = Patience(clock)
        self._jobs = anyio.Semaphore(JOBS_AT_ONCE)
        self._in_hand: set[Place] = set()
        self._paused: dict[Place, set[Paused]] = {}
        """What was paused once: whoever wakes it since may, while late ones are looked for."""
        self._wake = anyio.Event()
        self._until = math.inf

    def expect(self, due_at: float) -> None:
        """Be awake at that moment, in seconds since the epoch."""
        if due_at < self._until:
            self._wake.set()

    async def run(self) -> None:
        """See to what is due, for ever."""
        self._patience.begin()
        async with anyio.create_task_group() as group:
            while True:
                await self._turn(group)

    async def _turn(self, group: anyio.abc.TaskGroup) -> None:
        # What comes up during the round is seen after it.
        self._wake, self._until = anyio.Event(), math.inf
        try:
            wait = await self._round(group)
        except Exception:  # the store may be better in a while
            logger.exception("cannot look for leases that are due")
            wait = RETRY_S
        self._until = self._clock.now() + wait
        with self._patience.sleeping(wait), anyio.move_on_after(wait):
            await self._wake.wait()

    async def _round(self, group: anyio.abc.TaskGroup) -> float:
        """Begin on all that is due; seconds until the next is."""
        self._patience.look()
        now = self._clock.now()
        wait = math.inf
        for lease in await self._book.due(now):
            if lease.superseding or lease.lapsing or not (left := self._patience.left(lease)):
                self._begin(group, (lease.project, lease.job))
            else:
                wait = min(wait, left)
        nearest = await self._book.nearest(now)
        if nearest is not None:
            wait = min(wait, nearest - now)
        if self._book.shared:
            wait = min(wait, READ_IDLE_S if math.isinf(wait) else READ_AGAIN_S)
        return wait

    def _begin(self, group: anyio.abc.TaskGroup, place: Place) -> None:
        if place not in self._in_hand:
            self._in_hand.add(place)
            group.start_soon(self._see_to, place)

    async def _see_to(self, place: Place) -> None:
        try:
            async with self._jobs:
                # Read anew: a renewal while it waited for its turn must not cost its holder a pause.
                lease = await self._book.find(*place)
                if lease and lease.due_at is not None and lease.due_at <= self._clock.now():
                    await self._settle(lease)
        except Exception:  # one job's trouble must not end the task that looks after all
            logger.exception("cannot see to a job", extra={"job": place[1]})
            await anyio.sleep(RETRY_S)
        finally:
            self._in_hand.discard(place)
            self._wake.set()

    async def _settle(self, seen: Lease) -> None:
        lease = await self._declare(seen)
        if lease is None:
            return  # renewed at the last moment
        began = self._clock.now()
        done = await self._carry_out(lease)
        now: Lease | None = lease
        while now is not None and now.epoch == lease.epoch:
            after = looked(now, began, self._clock.now(), self._patience.left(now), done=done)
            if await self._book.replace(now, after):
                self._forget_paused(after)
                return
            now = await self._book.find(lease.project, lease.job)

    async def _declare(self, lease: Lease) -> Lease | None:
        """Write down that it has lapsed, if it has; None if it is another by now."""
        now = self._clock.now()
        if not expired(lease, now) or self._patience.left(lease):
            return lease
        lapsed = replace(lease, lapsed_at=now, lapsing=True, due_at=now)
        logger.warning("a lease has lapsed", extra=_about(lease))
        return await self._book.replace(lease, lapsed)

    async def _carry_out(self, lease: Lease) -> bool:
        """Do what is owed; whether all of it is done and every node was asked."""
        try:
            members = await find_members(self._edges, lease.project, lease.job)
        except DsecError as exc:
            logger.warning("no node answers", extra=_about(lease, error=exc.message))
            return False
        done = members.complete
        async with carried_out(self._edges, self._orders(lease, members.views)) as items:
            async for item in items:
                done = self._note(lease, item) and done
        return done

    def _orders(self, lease: Lease, views: list[SandboxView]) -> list[Order]:
        before: AbstractSet[Paused] = self._paused.get((lease.project, lease.job), frozenset())
        orders = ((view, ordered(lease, view)) for view in views)
        return [
            order
            for view, order in orders
            if order is not None and (order.verb == "reap" or _paused(lease, view) not in before)
        ]

    def _note(self, lease: Lease, item: JobItem) -> bool:
        """Remember and tell what an order has come to; whether there is nothing more to do."""
        if item.error is None:
            if item.sandbox is not None:
                seen = self._paused.setdefault((lease.project, lease.job), set())
                seen.add(_paused(lease, item.sandbox))
            logger.info("nobody holds its epoch", extra=_about(lease, sandbox_id=item.id))
            return True
        logger.warning(
            "cannot be seen to",
            extra=_about(lease, sandbox_id=item.id, error=item.error.message),
        )
        return item.error.code == Unsupported.code  # it will not be had tomorrow either

    def _forget_paused(self, lease: Lease) -> None:
        if not lease.superseding and not lease.lapsing:
            self._paused.pop((lease.project, lease.job), None)


def expired(lease: Lease, now: float) -> bool:
    """Whether it was not renewed in time, and nobody has said so yet."""
    return lease.lapsed_at is None and lease.expires_at is not None and lease.expires_at <= now


def owed(lease: Lease, view: SandboxView) -> LeasePolicy | None:
    """What is to become of a sandbox of the job; None = nothing.

    One of epoch 0 was made while there was no lease: it is nobody's to lose.
    """
    if lease.superseding and 0 < view.epoch < lease.epoch:
        return lease.on_superseded
    if lease.lapsing and view.epoch == lease.epoch:
        return lease.on_lapse
    return None


def ordered(lease: Lease, view: SandboxView) -> Order | None:
    """What has to be ordered for that; None = nothing, or it is so already."""
    superseded, sandbox = view.epoch < lease.epoch, sandbox_id(view.id)
    why = _why(lease, view, superseded=superseded)
    match owed(lease, view):
        case "reap":
            reason = StopReason.LEASE_SUPERSEDED if superseded else StopReason.LEASE_LAPSED
            return Order(sandbox, "reap", reason, why)
        case "pause" if superseded:
            # Its own people would wake it by any request, and they do not know yet.
            is_held = view.pause is not None and view.pause.held
            return None if is_held else Order(sandbox, "pause", why=why)
        case "pause" if view.state is not SandboxState.PAUSED:
            return Order(sandbox, "pause")
        case _:
            return None


def _paused(lease: Lease, view: SandboxView) -> Paused:
    superseded = view.epoch < lease.epoch
    return view.id, (lease.taken_at if superseded else lease.lapsed_at or 0.0)


def _why(lease: Lease, view: SandboxView, *, superseded: bool) -> str:
    if superseded:
        return f"{whose(view)} is superseded: {lease.holder} has epoch {lease.epoch}"
    return f"{whose(view)} has lapsed: {lease.holder} did not renew it in time"


def looked(lease: Lease, began: float, now: float, patience: float, *, done: bool) -> Lease:
    """The lease after a look.

    Args:
        lease: as it is.
        began: when the look began.
        now: and ended.
        patience: seconds for which nothing may be said to have lapsed.
        done: everything owed was done, and no node was left out.
    """
    superseding = lease.superseding and not (done and began > lease.taken_at + LATE_S)
    lapsed_at = lease.lapsed_at
    lapsing = lease.lapsing and not (done and lapsed_at is not None and began > lapsed_at + LATE_S)
    moments = [_again(now, lease.taken_at)] if superseding else []
    if lapsing and lapsed_at is not None:
        moments.append(_again(now, lapsed_at))
    if lease.expires_at is not None and lapsed_at is None:
        moments.append(max(lease.expires_at, now + patience))
    due_at = min(moments, default=None)
    return replace(lease, superseding=superseding, lapsing=lapsing, due_at=due_at)


def _again(now: float, since: float) -> float:
    return now + min(max((now - since) / 4, AGAIN_S), AGAIN_AT_MOST_S)


def _about(lease: Lease, **more: object) -> dict[str, object]:
    return {"project": lease.project, "job": lease.job, "epoch": lease.epoch, **more}
