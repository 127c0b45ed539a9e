"""When sandboxes have to be looked at: one heap and one task for the whole edge.

A sandbox has one entry, whatever it does: using it moves no entry, it only makes the look at its old
time find that there is nothing to do yet. So a busy sandbox costs one look per TTL, an idle one
none until it is due.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import anyio.abc

from dsec.base.clock import Clock
from dsec.base.states import StopReason

logger = logging.getLogger("dsec.edge.ttl")

SLACK = 1024
RETRY_S = 10.0
"""When to look again after a look that failed."""

Look = Callable[[str], Awaitable[float | None]]
"""Looks at a sandbox; returns when to look again (monotonic), None = never."""


@dataclass(frozen=True)
class Stop:
    """Its time is over."""

    reason: StopReason


@dataclass(frozen=True)
class Later:
    """Nothing to do before `at` (monotonic); None = never."""

    at: float | None


@dataclass(frozen=True)
class AskCommands:
    """It looks idle: whether a command runs in it has to be asked."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """What decides how long a sandbox may go on. Seconds, monotonic where they are moments."""

    now: float
    idle_since: float | None
    """None while an operation is open."""
    idle_ttl_s: float | None
    dies_at: float | None


def judge(times: Times) -> Stop | Later | AskCommands:
    """Decide what to do about a sandbox. Pure."""
    if times.dies_at is not None and times.now >= times.dies_at:
        return Stop(StopReason.LIFETIME)
    idle_at = None
    if times.idle_ttl_s is not None:
        idle_at = (times.now if times.idle_since is None else times.idle_since) + times.idle_ttl_s
        if times.now >= idle_at:
            return AskCommands()
    return Later(min((at for at in (idle_at, times.dies_at) if at is not None), default=None))


class Ttl:
    """The heap and its task."""

    def __init__(self, clock: Clock, look: Look) -> None:
        self._clock = clock
        self._look = look
        self._heap: list[tuple[float, str]] = []
        self._watched: dict[str, float | None] = {}
        self._sooner = anyio.Event()

    def watch(self, sandbox: str, at: float | None) -> None:
        """Look at a sandbox at a moment (monotonic), not at the one said before."""
        if at is None:
            return
        self._watched[sandbox] = at
        heapq.heappush(self._heap, (at, sandbox))
        self._tidy()
        if self._heap[0][1] == sandbox:
            self._sooner.set()

    def forget(self, sandbox: str) -> None:
        """A sandbox is over; its entry goes when it is due, or when too many such have gathered."""
        self._watched.pop(sandbox, None)
        self._tidy()

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._watched) + SLACK:
            waiting = self._watched.items()
            self._heap = [(at, name) for name, at in waiting if at is not None]
            heapq.heapify(self._heap)

    async def run(self) -> None:
        """Look at whatever is due, for ever."""
        async with anyio.create_task_group() as group:
            while True:
                now = self._clock.monotonic()
                while self._heap and self._heap[0][0] <= now:
                    # Each look is a task of its own: one that hangs holds up no other.
                    at, sandbox = heapq.heappop(self._heap)
                    if self._watched.get(sandbox) == at:
                        self._watched[sandbox] = None  # it is being looked at
                        group.start_soon(self._look_at, sandbox)
                await self._wait()

    async def _wait(self) -> None:
        if self._heap:
            delay = self._heap[0][0] - self._clock.monotonic()
            with anyio.move_on_after(max(0.0, delay)):
                await self._sooner.wait()
        else:
            await self._sooner.wait()
        self._sooner = anyio.Event()

    async def _look_at(self, sandbox: str) -> None:
        try:
            again = await self._look(sandbox)
        except Exception:  # a bug met at one sandbox must not end the looking at all others
            logger.exception("could not be looked at", extra={"sandbox_id": sandbox})
            again = self._clock.monotonic() + RETRY_S
        if sandbox in self._watched:
            self.watch(sandbox, again)
