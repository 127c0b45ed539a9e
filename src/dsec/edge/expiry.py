"""What happens to sandboxes whose time is up: `ttl` says when to look, this looks and acts.

A paused sandbox is asked nothing and stays as long as its lifetime allows: its idle time begins anew
when it is resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import anyio

from dsec.base.clock import Clock
from dsec.base.errors import DsecError
from dsec.base.states import SandboxState, StopReason
from dsec.edge import commands
from dsec.edge.lifecycle import machine
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.ttl import AskCommands, Later, Stop, Times, Ttl, judge

logger = logging.getLogger("dsec.edge.expiry")

LOOK_DEADLINE_S = 10.0

Detached = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Does something as the edge's own task."""


class Expiry:
    """Watches the sandboxes of an edge."""

    def __init__(self, clock: Clock, live: Mapping[str, Owner], detached: Detached) -> None:
        """Make one that watches nothing yet.

        Args:
            clock: what time it is.
            live: the edge's sandboxes, as they come and go.
            detached: how what takes long is done.
        """
        self._clock = clock
        self._live = live
        self._detached = detached
        self._ttl = Ttl(clock, self._look)

    async def run(self) -> None:
        """Look at whatever is due, for ever."""
        await self._ttl.run()

    def watch(self, owner: Owner) -> None:
        """Look at a sandbox when its time may be up; again when that changes."""
        if owner.state in machine.ALIVE:
            verdict = judge(self._times(owner))
            at = verdict.at if isinstance(verdict, Later) else self._clock.monotonic()
            self._ttl.watch(owner.record.id, at)

    def forget(self, sandbox: str) -> None:
        """It is over."""
        self._ttl.forget(sandbox)

    def _times(self, owner: Owner) -> Times:
        spec, now = owner.record.spec, self._clock.monotonic()
        dies_at = None
        if spec.max_lifetime_s is not None:
            age = self._clock.now() - owner.record.created_at
            dies_at = now + spec.max_lifetime_s - age
        at_work = owner.busy or owner.state is not SandboxState.RUNNING
        return Times(
            now=now,
            idle_since=None if at_work else owner.idle_since,
            idle_ttl_s=spec.ttl_running_stop,
            dies_at=dies_at,
        )

    async def _look(self, sandbox: str) -> float | None:
        """Look at a sandbox that may be due; when to look again."""
        owner = self._live.get(sandbox)
        if owner is None or owner.state not in machine.ALIVE:
            return None
        verdict = judge(self._times(owner))
        if isinstance(verdict, AskCommands):
            verdict = await self._ask_commands(owner)
        if isinstance(verdict, Later):
            return verdict.at
        if verdict.reason is StopReason.IDLE and owner.record.spec.idle_action == "pause":
            return await self._pause(owner)
        await self._stop(owner, verdict.reason)
        return None

    async def _ask_commands(self, owner: Owner) -> Stop | Later:
        """An idle-looking sandbox is idle from the end of its last command on."""
        ttl = owner.record.spec.ttl_running_stop or 0.0
        channel = owner.channel
        if channel is None:
            return Stop(StopReason.IDLE)
        try:
            with anyio.fail_after(LOOK_DEADLINE_S):
                running, last_end = await commands.any_running(channel)
        except (DsecError, TimeoutError):
            return Later(self._clock.monotonic() + min(ttl, LOOK_DEADLINE_S))
        now = self._clock.monotonic()
        ended = now - max(0.0, self._clock.now() - last_end)
        since = now if running or owner.busy else max(owner.idle_since, ended if last_end else 0.0)
        owner.idle_since = max(owner.idle_since, since)
        verdict = judge(self._times(owner))
        return Stop(StopReason.IDLE) if isinstance(verdict, AskCommands) else verdict

    async def _pause(self, owner: Owner) -> float:
        """Pause an idle one; it is looked at again as one that has just been used."""
        seen = owner.idle_since
        in_use = lambda: bool(owner.busy) or owner.idle_since != seen  # noqa: E731
        try:
            await self._detached(partial(owner.pause, in_use))
        except DsecError:
            logger.exception("could not be paused", extra={"sandbox_id": owner.record.id})
        verdict, now = judge(self._times(owner)), self._clock.monotonic()
        if isinstance(verdict, Stop):
            return now  # its lifetime ended meanwhile
        ttl = owner.record.spec.ttl_running_stop or 0.0
        at = verdict.at if isinstance(verdict, Later) else None
        return at if at is not None else now + ttl

    async def _stop(self, owner: Owner, reason: StopReason) -> None:
        try:
            await self._detached(partial(owner.stop, reason))
        except DsecError:
            logger.exception("could not be stopped", extra={"sandbox_id": owner.record.id})
