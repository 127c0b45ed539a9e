"""The one object that acts on a sandbox.

Everything that changes a sandbox goes through `Owner`, one thing after the other: `_turn` is a fair
lock, which gives the order an owner task with a queue would give and costs no task while nothing
happens. Reading and using the sandbox need no turn: a wedged command never blocks a stop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import anyio
import anyio.abc

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, InternalError, SandboxGone, StartFailed, Unavailable
from dsec.base.states import FINAL, SandboxState, StopReason
from dsec.edge.backends.interface import Backend, CountsOomKills
from dsec.edge.channel import AetherChannel, gone
from dsec.edge.lifecycle import machine
from dsec.edge.lifecycle.journal import Journal, Mark
from dsec.edge.lifecycle.machine import Action
from dsec.edge.record import SandboxRecord
from dsec.images import disk
from dsec.images.records import Environment
from dsec.kit.blocking import in_thread
from dsec.kit.http import as_error
from dsec.wire.sandbox import Fault, SandboxView, Usage

logger = logging.getLogger("dsec.edge.owner")

LAUNCH_DEADLINE_S = 60.0
CONNECT_DEADLINE_S = 5.0
KILL_DEADLINE_S = 30.0
CLEAN_DEADLINE_S = 120.0
CLEAN_TRIES = 4
EPITAPH_LOOKS, EPITAPH_PAUSE_S = 10, 0.005
MAX_REVIVALS = 64
"""A connection that breaks more often than this in one life means an aether gone wrong."""
REACH_TRIES, REACH_PAUSE_S = 10, 0.5
"""What the host lacks for a moment (descriptors, memory) does not end a sandbox."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all owners of a node share."""

    node: str
    clock: Clock
    journal: Journal
    group: anyio.abc.TaskGroup
    """Parent of what a sandbox's own events start."""
    on_over: Callable[[Owner], None]
    """Called once, when nothing of a sandbox is left."""
    data_failed_since: Callable[[Environment, str, float], bool]
    """Whether data of a sandbox's environment could not be read at some time since then."""
    faults: Callable[[Environment, str], list[Fault]]
    """What keeps a sandbox on an environment from working as it should, now."""


class Owner:
    """One live sandbox."""

    __slots__ = (
        "_around",
        "_backend",
        "_revivals",
        "_turn",
        "busy",
        "channel",
        "detail",
        "ended_at",
        "failure",
        "idle_since",
        "oom_commands",
        "oom_kills",
        "over",
        "ready",
        "reason",
        "record",
        "state",
    )

    def __init__(self, record: SandboxRecord, backend: Backend, around: Surroundings) -> None:
        self.record = record
        self.state = SandboxState.CREATING
        self.reason: StopReason | None = None
        self.detail = ""
        self.failure: DsecError | None = None
        """Why it could not be made."""
        self.ended_at: float | None = None
        self.channel: AetherChannel | None = None
        self.busy = 0
        self.idle_since = around.clock.monotonic()
        self.oom_kills = 0
        """Kills of its memory group that have been seen."""
        self.oom_commands: list[str] = []
        """Commands found to have ended by them."""
        self.ready = anyio.Event()
        """Set when it is no longer being created."""
        self.over = anyio.Event()
        """Set when nothing of it is left."""
        self._backend = backend
        self._around = around
        self._turn = anyio.Lock()
        self._revivals = 0

    # using it

    @contextlib.contextmanager
    def use(self) -> Iterator[AetherChannel]:
        """The channel, for one operation; while it is held the sandbox is not idle.

        Raises:
            SandboxGone: it is over.
        """
        if self.state is not SandboxState.RUNNING or self.channel is None:
            raise self.gone()
        self.busy += 1
        try:
            yield self.channel
        finally:
            self.busy -= 1
            self.idle_since = self._around.clock.monotonic()

    def gone(self) -> SandboxGone:
        """The error for whoever wants something of it now that it is over."""
        return gone(self.record.id, str(self.reason or self.state), self.detail)

    def view(self) -> SandboxView:
        """As it stands."""
        record, clock = self.record, self._around.clock
        running = self.state is SandboxState.RUNNING
        idle_s = clock.monotonic() - self.idle_since
        return SandboxView(
            id=record.id,
            node=self._around.node,
            backend=record.spec.backend,
            image=record.spec.image,
            image_digest=record.image.digest,
            workspace=record.environment.workspace,
            toolkits=record.environment.toolkits,
            state=self.state,
            created_at=record.created_at,
            limits=record.spec.limits,
            ttl_running_stop=record.spec.ttl_running_stop,
            max_lifetime_s=record.spec.max_lifetime_s,
            idle_since=clock.now() - idle_s if running and not self.busy else None,
            ended_at=self.ended_at,
            stop_reason=self.reason,
            stop_detail=self.detail,
            labels=record.spec.labels,
            project=record.project,
            warnings=record.warnings,
            faults=self._around.faults(record.environment, record.id) if running else [],
        )

    async def usage(self) -> Usage:
        """What it uses, seen from outside."""
        with _deadline(CONNECT_DEADLINE_S, "its usage could not be read"):
            return await self._backend.usage(self.record)

    def oom_kill_seen(self) -> bool:
        """Whether its memory limit has killed since the last look."""
        if not isinstance(self._backend, CountsOomKills):
            return False
        count = self._backend.oom_kills(self.record)
        rose = count > self.oom_kills
        self.oom_kills = max(self.oom_kills, count)
        return rose

    def data_failed_since(self, since: float) -> bool:
        """Whether parts of its environment could not be read at some time since then (wall clock)."""
        return self._around.data_failed_since(self.record.environment, self.record.id, since)

    # changing it

    async def create(self) -> None:
        """Make it. Never raises what went wrong: `failure` says so, and `ready` is set."""
        async with self._turn:
            if self.state is not SandboxState.CREATING:
                return  # stopped while it waited for its turn
            try:
                await in_thread("disk", self._around.journal.create, self.record)
            except OSError as exc:
                self.failure = self._not_started(exc, "its journal could not be written", "journal")
            except Exception as exc:  # noqa: BLE001 - the edge outlives a bug in one sandbox
                self.failure = as_error(exc)
            if self.failure is None:
                await self._follow_quietly(machine.Ordered())
            else:
                await self._follow_quietly(machine.LaunchFailed())

    async def adopt(self, stopping: StopReason | None) -> None:
        """Take over what an earlier run of the edge left."""
        async with self._turn:
            lost = await self._reach() if stopping is None else None
            if lost is not None and not isinstance(lost, SandboxGone):
                self.detail = lost.message
            self.oom_kill_seen()  # what was killed before is not held against a later command
            answers = stopping is None and lost is None
            await self._follow_quietly(machine.Found(answers, stopping))

    async def stop(self, reason: StopReason) -> None:
        """Stop it and return when nothing of it is left. Harmless twice.

        Raises:
            InternalError: something of it cannot be removed; calling again tries again.
        """
        async with self._turn:
            if self.over.is_set():
                return
            if self.state is SandboxState.RUNNING or self.state is SandboxState.CREATING:
                await self._follow(machine.StopWanted(reason))
            else:
                await self._act(machine.REMOVAL)

    def detach(self) -> None:
        """Let go of it without changing it: the edge ends, the sandbox goes on."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close(Unavailable("the edge is going down; ask again"))

    async def _revive(self, lost: AetherChannel) -> None:
        """The channel ended: reach its aether again, or find that it has died."""
        async with self._turn:
            if self.channel is not lost or self.state is not SandboxState.RUNNING:
                lost.close(self.gone())
                return
            self._revivals += 1
            if self._revivals > MAX_REVIVALS:
                # Nobody could use it any more, nor ask whether it is idle: it must not stay for ever.
                self.detail = f"its connection broke {self._revivals} times"
                await self._follow_quietly(machine.Died())
            elif failure := await self._reach():
                self.detail = await self._epitaph(failure)
                await self._follow_quietly(machine.Died())
            else:
                lost.close(Unavailable("the connection to the sandbox was renewed; ask again"))

    async def _reach(self) -> DsecError | None:
        """Connect; why it cannot be reached, whatever its aether says and the host lacks."""
        for left in reversed(range(REACH_TRIES)):
            try:
                await self._connect()
            except OSError as exc:
                if not left:
                    return InternalError(f"it could not be reached: {exc}", errno=exc.errno)
                logger.warning("could not be reached yet", extra=self._about(error=str(exc)))
                await anyio.sleep(REACH_PAUSE_S)
            except Exception as exc:  # noqa: BLE001 - the edge outlives a bug in one sandbox
                return as_error(exc)
            else:
                return None
        raise AssertionError("unreachable")

    async def _epitaph(self, failure: DsecError) -> str:
        """How it ended. The launcher's word may come a moment after the connection has gone."""
        for _ in range(EPITAPH_LOOKS):
            if words := self._backend.epitaph(self.record.id):
                return words
            await anyio.sleep(EPITAPH_PAUSE_S)
        return "its first process ended" if isinstance(failure, SandboxGone) else failure.message

    async def _follow_quietly(self, event: machine.Event) -> None:
        """Nobody waits for this one: what cannot be removed stays for the next sweep."""
        try:
            await self._follow(event)
        except Exception:
            logger.exception("could not be removed", extra=self._about())
            self.ready.set()

    async def _follow(self, event: machine.Event) -> None:
        """Let an event happen: the machine decides, this carries it out."""
        step = machine.step(self.state, event)
        self._enter(step)
        await self._act(step.actions)

    def _enter(self, step: machine.Step) -> None:
        if step.state is self.state:
            return
        self.state = step.state
        self.reason = step.reason or self.reason
        if step.state in FINAL or step.state is SandboxState.STOPPING:
            self.ended_at = self.ended_at or self._around.clock.now()
            if self.failure is not None:
                self.detail = self.failure.message
            if self.channel is not None:
                self.channel.close(self.gone())
        if step.state is not SandboxState.FAILED or self.failure is None:
            self.ready.set()  # a failed creation is told of when it has been taken back
        logger.info("state", extra=self._about(state=self.state, reason=self.reason))

    async def _act(self, actions: tuple[Action, ...]) -> None:
        if actions and actions[0] is Action.LAUNCH:
            await self._launch()
        elif actions:
            await self._remove()

    async def _launch(self) -> None:
        try:
            with anyio.fail_after(LAUNCH_DEADLINE_S):
                await self._backend.launch(self.record)
                await self._mark(("done", Action.LAUNCH, ""), ("begun", Action.CONNECT, ""))
                await self._connect()
                await self._mark(("done", Action.CONNECT, ""))
        except TimeoutError:
            self.failure = StartFailed(f"not started in {LAUNCH_DEADLINE_S:.0f} s", step="deadline")
        except OSError as exc:
            self.failure = self._not_started(exc, "could not be started", "launch")
        except Exception as exc:  # noqa: BLE001 - the edge outlives a bug in one sandbox
            self.failure = as_error(exc)
        if self.failure is None:
            await self._follow(machine.Launched())
        else:
            await self._follow_quietly(machine.LaunchFailed())

    def _not_started(self, exc: OSError, what: str, step: str) -> DsecError:
        if exc.errno in disk.FULL:
            return disk.storage_full(self.record.path.parent)
        return StartFailed(f"{what}: {exc}", step=step, errno=exc.errno)

    async def _connect(self) -> None:
        with _deadline(CONNECT_DEADLINE_S, "its aether did not answer"):
            stream = await self._backend.connect(self.record)
            channel = AetherChannel(self._lost)
            try:
                await channel.start(stream, self._around.group)
            except BaseException:
                channel.close()  # or its descriptor would stay for as long as the peer likes
                raise
            self.channel = channel

    def _lost(self, channel: AetherChannel) -> None:
        # Streams are left open until it is known whether the sandbox is over: then they hear why.
        if self.channel is channel and self.state is SandboxState.RUNNING:
            self._around.group.start_soon(self._revive, channel)
        else:
            channel.close(self.gone() if self.ended_at else None)

    async def _remove(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep it from being removed
            await self._mark(("begun", Action.KILL, str(self.reason or "")))
        with _deadline(KILL_DEADLINE_S, "its processes did not end"):
            await self._backend.kill(self.record)
        with contextlib.suppress(OSError):
            await self._mark(("done", Action.KILL, ""), ("begun", Action.CLEAN, ""))
        await self._clean()
        after = machine.step(self.state, machine.Cleaned())
        self.state = after.state
        await in_thread("disk", self._around.journal.forget, self.view())
        self.over.set()
        self.ready.set()
        self._around.on_over(self)

    async def _clean(self) -> None:
        """Clean, with patience: a mount may be busy for a moment after its last process ended."""
        for left in reversed(range(CLEAN_TRIES)):
            try:
                with _deadline(CLEAN_DEADLINE_S, "it was not cleaned up"):
                    await self._backend.clean(self.record)
            except InternalError:
                if not left:
                    raise
                await anyio.sleep(0.1 * 4 ** (CLEAN_TRIES - 1 - left))
            else:
                return

    async def _mark(self, *lines: tuple[Mark, str, str]) -> None:
        await in_thread("disk", self._around.journal.mark_all, self.record.id, list(lines))

    def _about(self, **more: object) -> dict[str, object]:
        return {"sandbox_id": self.record.id, **more}


@contextlib.contextmanager
def _deadline(seconds: float, otherwise: str) -> Iterator[None]:
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise InternalError(f"{otherwise} in {seconds:.0f} s") from None
