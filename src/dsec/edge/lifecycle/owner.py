"""The one object that acts on a sandbox.

Everything that changes a sandbox goes through `Owner`, one thing after the other: `_turn` is a fair
lock, which gives the order an owner task with a queue would give and costs no task while nothing
happens. Reading and using the sandbox need no turn: a wedged command never blocks a stop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.abc

from dsec.base.errors import DsecError, InternalError, SandboxGone, StartFailed, Unavailable
from dsec.base.states import FINAL, SandboxState, StopReason
from dsec.edge.backends.interface import Backend, CountsOomKills
from dsec.edge.channel import AetherChannel, gone
from dsec.edge.lifecycle import failures, machine, resting
from dsec.edge.lifecycle.journal import Mark
from dsec.edge.lifecycle.machine import Action
from dsec.edge.lifecycle.standing import Standing
from dsec.edge.lifecycle.surroundings import Changing, Surroundings
from dsec.edge.record import SandboxRecord
from dsec.images import disk
from dsec.kit.blocking import in_thread
from dsec.kit.http import as_error
from dsec.wire.sandbox import Pause, SandboxView, Usage

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

NOT_LET_GO = "it could not be let go on"


class Owner:
    """One live sandbox."""

    __slots__ = (
        "_around",
        "_backend",
        "_revivals",
        "_standing",
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
        "paused",
        "ready",
        "reason",
        "record",
        "state",
        "warnings",
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
        self.warnings: tuple[str, ...] = ()
        """What whoever looks at it has to know besides."""
        self.paused: Pause | None = None
        """What its pause gave back, while it is paused."""
        self.ready = anyio.Event()
        """Set when it is no longer being created."""
        self.over = anyio.Event()
        """Set when nothing of it is left."""
        self._backend = backend
        self._around = around
        self._turn = anyio.Lock()
        self._revivals = 0
        self._standing = Standing()

    # using it

    @contextlib.asynccontextmanager
    async def use(
        self, seconds: float | None = None, what: str = ""
    ) -> AsyncIterator[AetherChannel]:
        """The channel, for one operation; while it is held the sandbox is not idle.

        A paused sandbox is resumed for it. What is open when a pause comes waits with the sandbox.

        Args:
            seconds: how long it may take, pauses not counted; None = as long as it likes.
            what: it is, for the error.

        Raises:
            SandboxGone: it is over. CapacityUnavailable: it is paused, and there is no room now.
            DeadlineExceeded: it took longer.
        """
        if self.state is not SandboxState.RUNNING:
            await self.wake()
        if self.channel is None:
            raise self.gone()
        self.busy += 1
        try:
            with self.channel.within(seconds, what):
                yield self.channel
        finally:
            self.busy -= 1
            self.idle_since = self._around.clock.monotonic()

    def _check_running(self) -> None:
        if self.state is not SandboxState.RUNNING:
            raise self.gone()

    def gone(self) -> SandboxGone:
        """The error for whoever wants something of it now that it is over."""
        return gone(self.record.id, str(self.reason or self.state), self.detail)

    def view(self) -> SandboxView:
        """As it stands."""
        record, clock = self.record, self._around.clock
        running = self.state is SandboxState.RUNNING
        idle_s = clock.monotonic() - self.idle_since
        view = record.view(self._around.node, self.state)
        view.warnings += self.warnings
        view.ended_at, view.stop_reason, view.stop_detail = self.ended_at, self.reason, self.detail
        view.pause = self.paused
        if running:
            view.idle_since = None if self.busy else clock.now() - idle_s
            view.faults = self._around.faults(record.environment, record.id)
        return view

    async def usage(self) -> Usage:
        """What it uses, seen from outside."""
        with resting.within(CONNECT_DEADLINE_S, "its usage could not be read"):
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
                self.failure = failures.not_written(self.record, exc)
            except Exception as exc:  # noqa: BLE001 - the edge outlives a bug in one sandbox
                self.failure = as_error(exc)
            if self.failure is None:
                await self._follow_quietly(machine.Ordered())
            else:
                await self._follow_quietly(machine.LaunchFailed())

    async def adopt(
        self, stopping: StopReason | None, pause: Pause | None = None, *, unsettled: bool = False
    ) -> None:
        """Take over what an earlier run of the edge left.

        Args:
            stopping: why it was being removed, if it was.
            pause: what its pause had given back, if it was paused: it stays so.
            unsettled: it may stand frozen and shall run.
        """
        async with self._turn:
            if stopping is not None:
                lost = None
            elif pause is not None:
                lost = await self._found_paused(pause)
            else:
                lost = await self._found_running(unsettled=unsettled)
            if lost is not None and not isinstance(lost, SandboxGone):
                self.detail = lost.message
            self.oom_kill_seen()  # what was killed before is not held against a later command
            answers = stopping is None and lost is None
            await self._follow_quietly(machine.Found(answers, stopping))

    async def stop(self, reason: StopReason, detail: str = "") -> None:
        """Stop it, for a reason and in words, and return when nothing of it is left. Harmless twice.

        Raises:
            InternalError: something of it cannot be removed; calling again tries again.
        """
        with self._standing.given_up():
            await self._turn.acquire()
        try:
            if self.state in machine.ALIVE or self.state is SandboxState.CREATING:
                self.detail = detail
                await self._around.last_look(self)
                await self._follow(machine.StopWanted(reason))
            elif not self.over.is_set():
                await self._act(machine.REMOVAL)
        finally:
            self._turn.release()

    async def pause(self, unless: Callable[[], bool] | None = None, held: str = "") -> None:
        """Freeze it and take back its memory; harmless twice.

        Args:
            unless: asked when its turn has come; True = leave it as it is.
            held: why only an explicit resume may wake it then; "" = whatever wants to use it does.

        Raises:
            SandboxGone: it is over. Unsupported, StorageFull, InternalError: it runs on.
        """
        if self.record.id in self._around.paused and not held:
            return
        async with resting.place(), self._standing.resting(self._turn, held=bool(held)):
            if unless is not None and unless():
                return
            if self.state is not SandboxState.PAUSED:
                self._check_running()
                await self._follow(machine.PauseWanted())
            if held:
                pause = resting.held(self.paused, held)
                with disk.full_disk_named(self.record.path.parent):
                    await self._mark(("done", Action.PAUSE, resting.said(pause)))
                self.paused = pause

    async def wake(self, *, explicitly: bool = False) -> None:
        """Have it run: cuts a pause short, waits while it is resumed, and resumes one that is paused.

        Raises:
            SandboxGone: it is over. CapacityUnavailable: there is no room now; it stays paused.
            Conflict: it is held in its pause.
        """
        if self.state is SandboxState.RUNNING:
            return
        if self.state not in machine.ALIVE:
            raise self.gone()
        async with self._standing.wanted(self._turn, explicitly=explicitly):
            if self.state is SandboxState.PAUSED:
                if not explicitly:
                    resting.check_wakes(self.record.id, self.paused)
                await self._around.admit(self.record)
                with anyio.CancelScope(shield=True):  # who asked may leave, and others wait
                    await self._follow(machine.ResumeWanted())
            self._check_running()

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Have it stand still, and go on afterwards as it did, whatever happens.

        Its turn is held: nothing else begins to change it meanwhile, and what wants to use it waits
        like what runs in it; a stop ends it. A paused one stands still already, and stays paused.

        Raises:
            SandboxGone: it is over, or about to be. Conflict: what was done meanwhile took too long.
            Unsupported, InternalError: it cannot be frozen; it runs on.
                InternalError: it cannot be let go on; it is paused then.
            StorageFull: it could not be noted down; it runs on.
        """
        async with self._turn:
            if self.state is SandboxState.PAUSED:
                await resting.freeze(self._backend, self.record)  # if a failure left it half so
                with self._standing.briefly(self.record.id):
                    yield
                return
            self._check_running()
            with disk.full_disk_named(self.record.path.parent):
                await self._mark(("begun", Action.STILL, ""))
            try:
                if self.channel is not None:
                    await resting.hold(self.channel)
                await resting.freeze(self._backend, self.record)
                with self._standing.briefly(self.record.id):
                    yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._thaw()
                    if self.channel is not None:
                        await resting.release(self.channel)
                    with contextlib.suppress(OSError):
                        await self._mark(("done", Action.STILL, ""))

    async def change(self, work: Changing) -> None:
        """Change what of it can change, paused or not: `work` does it, and says what its record is.

        Raises:
            SandboxGone: it is over. What `work` raises: nothing has changed.
        """
        async with self._turn:
            if self.state not in machine.ALIVE:
                raise self.gone()
            with anyio.CancelScope(shield=True):
                self.record = await work(self._backend, self._around.journal, self.record)

    def detach(self) -> None:
        """Let go of it without changing it: the edge ends, the sandbox goes on."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close(Unavailable("the edge is going down; ask again"))

    async def _revive(self, lost: AetherChannel) -> None:
        """The channel ended: reach its aether again, or find that it has died."""
        async with self._turn:
            if self.channel is not lost or self.state not in machine.ALIVE:
                lost.close(self.gone())
                return
            if self.state is SandboxState.PAUSED:
                await self._broke_in_pause(lost)
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
        if step.state is SandboxState.PAUSED:
            self._around.paused.add(self.record.id)
        elif self.paused is not None:
            self._around.paused.discard(self.record.id)
        if step.state in FINAL or step.state is SandboxState.STOPPING:
            self.ended_at = self.ended_at or self._around.clock.now()
            if self.failure is not None:
                self.detail = self.failure.message
            self.paused = None
            if self.channel is not None:
                self.channel.close(self.gone())
        if step.state is not SandboxState.FAILED or self.failure is None:
            self.ready.set()  # a failed creation is told of when it has been taken back
        logger.info("state", extra=self._about(state=self.state, reason=self.reason))

    async def _act(self, actions: tuple[Action, ...]) -> None:
        match actions[:1]:
            case ():
                return
            case (Action.LAUNCH,):
                await self._launch()
            case (Action.PAUSE,):
                await self._pause()
            case (Action.RESUME,):
                await self._resume()
            case _:
                await self._remove()

    async def _pause(self) -> None:
        """Carry a pause out; one that fails is undone, and what failed is raised."""
        if self.channel is not None:
            await resting.hold(self.channel)
        try:
            await self._mark(("begun", Action.PAUSE, ""))
            with self._standing.unwanted() as recall:
                self.paused = await resting.rest(self._backend, self.record, recall)
            await self._mark(("done", Action.PAUSE, resting.said(self.paused)))
        except Exception as exc:
            logger.warning("could not be paused", extra=self._about(error=str(exc)))
            await self._follow(machine.PauseFailed())
            raise failures.not_paused(self.record, exc) from exc
        await self._follow(machine.Paused())

    async def _resume(self) -> None:
        """Let it go on, from a pause or from half of one."""
        with contextlib.suppress(OSError):  # a full disk must not keep it from going on
            await self._mark(("begun", Action.RESUME, ""))
        await self._thaw()
        self.paused = None
        self.idle_since = self._around.clock.monotonic()
        await self._go_on()
        if self.ended_at is not None:
            return
        with contextlib.suppress(OSError):
            await self._mark(("done", Action.RESUME, ""))
        self._around.group.start_soon(resting.refill, self._backend, self.record)

    async def _thaw(self) -> None:
        try:
            await resting.thaw(self._backend, self.record)
        except Exception as exc:
            await self._not_resumed(exc)
            raise as_error(exc) from exc

    async def _go_on(self) -> None:
        """It is thawed: have its channel again, or find that it has died."""
        channel, lost = self.channel, None
        if channel is not None:
            await resting.release(channel)
        else:
            lost = await self._reach()
        if lost is not None:
            self.detail = await self._epitaph(lost)
            await self._follow(machine.Died())
        elif self.state is SandboxState.RESUMING:
            await self._follow(machine.Resumed())

    async def _not_resumed(self, exc: Exception) -> None:
        logger.warning("could not be resumed", extra=self._about(error=str(exc)))
        if self.state is SandboxState.RESUMING:
            with contextlib.suppress(OSError):
                await self._mark(("undone", Action.RESUME, resting.said(self.paused)))
        else:
            self.paused = self._not_let_go(exc)
            if self.channel is not None:
                self.channel.release()  # nobody paused it: what is open does not wait for ever
        await self._follow(machine.ResumeFailed())

    def _not_let_go(self, exc: Exception) -> Pause:
        """It should run: tried once more soon, by whoever uses it next, and at a restart."""
        pause = Pause(at=self._around.clock.now(), detail=f"{NOT_LET_GO}: {exc}")
        stands = lambda: self.paused is pause  # noqa: E731
        self._around.group.start_soon(resting.try_again, self.wake, stands)
        return pause

    async def _found_paused(self, pause: Pause) -> DsecError | None:
        """It was left paused: see that it is there, and stands still."""
        self.state, self.paused = SandboxState.PAUSED, pause
        self._around.paused.add(self.record.id)
        self.ready.set()
        for look in (resting.freeze, resting.find):
            try:
                await look(self._backend, self.record)
            except SandboxGone as exc:
                return exc
            except Exception:  # what the host lacks for a moment: who wakes it finds out
                logger.exception("could not be looked at", extra=self._about())
        return None

    async def _found_running(self, *, unsettled: bool) -> DsecError | None:
        """It shall run: have it go on if a crash may have left it frozen, and connect."""
        try:
            if unsettled:
                await resting.thaw(self._backend, self.record)
        except SandboxGone as exc:
            return exc
        except Exception as exc:
            logger.exception("could not be let go on", extra=self._about())
            return await self._found_paused(self._not_let_go(exc))
        if unsettled:
            with contextlib.suppress(OSError):
                await self._mark(("done", Action.RESUME, ""))
        return await self._reach()

    async def _broke_in_pause(self, lost: AetherChannel) -> None:
        """A frozen aether closes nothing: either it has died, or the fault is on this side."""
        self.channel = None
        try:
            await resting.find(self._backend, self.record)
        except SandboxGone as exc:
            self.detail = await self._epitaph(exc)
            await self._follow_quietly(machine.Died())
        except (DsecError, OSError) as exc:
            logger.warning("its connection broke", extra=self._about(error=str(exc)))
        broke = Unavailable("the connection to the sandbox broke; ask again")
        lost.close(self.gone() if self.ended_at else broke)

    async def _launch(self) -> None:
        try:
            with anyio.fail_after(LAUNCH_DEADLINE_S):
                await self._backend.launch(self.record)
                await self._mark(("done", Action.LAUNCH, ""), ("begun", Action.CONNECT, ""))
                await self._connect()
                now = self._around.clock.now()
                await in_thread("disk", self._around.journal.launched, self.record, now)
        except TimeoutError:
            self.failure = StartFailed(f"not started in {LAUNCH_DEADLINE_S:.0f} s", step="deadline")
        except OSError as exc:
            self.failure = failures.not_started(self.record, exc)
        except Exception as exc:  # noqa: BLE001 - the edge outlives a bug in one sandbox
            self.failure = as_error(exc)
        if self.failure is None:
            await self._follow(machine.Launched())
        else:
            await self._follow_quietly(machine.LaunchFailed())

    async def _connect(self) -> None:
        with resting.within(CONNECT_DEADLINE_S, "its aether did not answer"):
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
        if self.channel is channel and self.state in machine.ALIVE:
            self._around.group.start_soon(self._revive, channel)
        else:
            channel.close(self.gone() if self.ended_at else None)

    async def _remove(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep it from being removed
            await self._mark(("begun", Action.KILL, f"{self.reason or ''} {self.detail}"))
        with resting.within(KILL_DEADLINE_S, "its processes did not end"):
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
                with resting.within(CLEAN_DEADLINE_S, "it was not cleaned up"):
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
