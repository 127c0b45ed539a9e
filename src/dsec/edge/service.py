"""The edge's use cases: `dsec.wire.edge_v1.EdgeApi`, and finding a sandbox for an operation on it.

    async with EdgeService(config, backends, images, clock).running() as edge: ...

`running` starts the backends, sweeps what an earlier run left, and holds every task of the edge.
Sandboxes go on when it ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.abc

from dsec.base.clock import Clock
from dsec.base.errors import (
    CapacityUnavailable,
    DsecError,
    InvalidRequest,
    NotFound,
    StartFailed,
    Unavailable,
    Unsupported,
)
from dsec.base.ids import node_id, node_of, sandbox_id
from dsec.base.states import SandboxState, StopReason
from dsec.edge import commands, forking, packing, resizing
from dsec.edge.admission import AdmissionLimits, NodeFacts, decide
from dsec.edge.backends.interface import Backend
from dsec.edge.catalog import Catalog
from dsec.edge.channel import gone
from dsec.edge.ended import Ended
from dsec.edge.images import Images
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.lifecycle.owner import Owner, Surroundings
from dsec.edge.record import SandboxRecord
from dsec.edge.sweep import sweep
from dsec.edge.ttl import AskCommands, Later, Stop, Times, Ttl, judge
from dsec.edge.uid_runs import FIRST, UidRuns
from dsec.kit.blocking import in_thread
from dsec.kit.http import as_error
from dsec.linux import hostinfo
from dsec.wire.edge_v1 import CreateOnEdge, ListFilter
from dsec.wire.public_v1 import (
    BatchItem,
    Capability,
    EnvironmentRef,
    NodeView,
)
from dsec.wire.sandbox import (
    DiffEntry,
    Fork,
    Pack,
    Resize,
    SandboxSpec,
    SandboxView,
    SnapshotView,
    Usage,
)

logger = logging.getLogger("dsec.edge.service")

QUEUE_DEADLINE_S = 120.0
"""A creation that has not begun by then is refused: nothing was started, ask elsewhere."""
FETCH_DEADLINE_S = 120.0
READY_DEADLINE_S = 300.0
STOP_DEADLINE_S = 300.0
LOOK_DEADLINE_S = 10.0
MEMORY_FRESH_S = 0.1
MAX_SOCKET_PATH = 107
"""sun_path holds 108 bytes with its NUL."""


@dataclass(frozen=True, kw_only=True)
class EdgeConfig:
    """One node's edge."""

    node: str
    state: Path
    """Journals and the sandboxes' writable layers; on one file system, private to root."""
    run: Path
    """Sockets; a short path, since a socket's may have 107 bytes."""
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    first_uid: int = FIRST
    version: str = ""
    """Of the program, for `describe`."""


class EdgeService(Catalog):
    """An edge."""

    def __init__(
        self,
        config: EdgeConfig,
        backends: Sequence[Backend],
        images: Images,
        clock: Clock,
        *,
        capabilities: Sequence[Capability] = (),
        after_write: Callable[[int], None] | None = None,
    ) -> None:
        """Put an edge together; nothing happens before `running`.

        Args:
            config: where and how much.
            backends: what can hold sandboxes here; the names are the requests'.
            images: the node's images, opened by the caller.
            clock: what time it is.
            capabilities: what `doctor` found of the host, for `describe`.
            after_write: called after each journal write, for tests that kill the edge there.

        Raises:
            InvalidRequest: the node id is malformed, or the run directory's path too long.
        """
        super().__init__(images)
        self.node = node_id(config.node)
        if len(str(config.run)) + 24 > MAX_SOCKET_PATH:
            raise InvalidRequest(f"{config.run} is too long for the path of a Unix socket")
        self._config = config
        self._backends = {backend.name: backend for backend in backends}
        self._clock = clock
        self._capabilities = list(capabilities)
        self._journal = Journal(config.state, after_write)
        self._live: dict[str, Owner] = {}
        self._ended = Ended(clock)
        self._uids = UidRuns(config.first_uid)
        self._ttl = Ttl(clock, self._look)
        self._launching = anyio.CapacityLimiter(config.limits.max_launching)
        self._memory = hostinfo.Memory(0, 0, 0)
        self._memory_at = float("-inf")
        self._trash = anyio.Event()
        self._group: anyio.abc.TaskGroup | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EdgeService]:
        """Run the edge. On entry everything an earlier run left is settled.

        Raises:
            OSError: a directory or helper it needs cannot be had.
        """
        await in_thread("disk", self._prepare)
        async with contextlib.AsyncExitStack() as stack:
            for backend in self._backends.values():
                await stack.enter_async_context(backend.running())
            self._group = await stack.enter_async_context(anyio.create_task_group())
            try:
                await self._settle_past()
                self._group.start_soon(self._ttl.run)
                self._group.start_soon(self._empty_trash)
                yield self
            finally:
                for owner in self._live.values():
                    owner.detach()
                self._group.cancel_scope.cancel()

    def _prepare(self) -> None:
        self._config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._config.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._journal.prepare()
        for view in self._journal.endings():
            self._ended.add(view)
        self._journal.unremember(self._ended.overdue())
        self._memory = hostinfo.memory()

    async def _settle_past(self) -> None:
        adopted: dict[str, Owner] = {}
        for story in await sweep(self._around(), self._backends, adopted):
            if story.record is not None:  # also of those that could be neither adopted nor undone
                self._uids.claim(story.record.uid_base)
        for sandbox, owner in adopted.items():
            if owner.over.is_set():
                continue
            self._live[sandbox] = owner
            self._watch(owner)
        self._images.environments.settled()
        self._trash.set()
        logger.info("swept", extra={"adopted": len(self._live), "found": len(adopted)})

    def _around(self) -> Surroundings:
        assert self._group is not None  # noqa: S101 - only while running
        return Surroundings(
            node=self.node,
            clock=self._clock,
            journal=self._journal,
            group=self._group,
            on_over=self._over,
            data_failed_since=self._images.environments.failed_since,
            faults=self._images.environments.faults,
        )

    # the node

    async def describe(self) -> NodeView:
        """How the node is."""
        await self._refresh_memory()
        owners = self._live.values()
        return NodeView(
            id=self.node,
            version=self._config.version,
            backends=sorted(self._backends),
            running=sum(owner.state is SandboxState.RUNNING for owner in owners),
            creating=sum(owner.state is SandboxState.CREATING for owner in owners),
            memory_total_bytes=self._memory.total_bytes,
            memory_available_bytes=self._memory.available_bytes,
            cpus=hostinfo.cpus(),
            capabilities=[
                *self._capabilities,
                *(entry for b in self._backends.values() for entry in b.capabilities()),
            ],
        )

    async def _refresh_memory(self) -> None:
        now = self._clock.monotonic()
        if now - self._memory_at >= MEMORY_FRESH_S:
            self._memory_at = now
            self._memory = await in_thread("scan", hostinfo.memory)

    # sandboxes

    async def create(self, request: CreateOnEdge) -> SandboxView:
        """Create a sandbox and wait until it runs; the same id again is the same sandbox.

        Raises:
            NotFound: no such image. Unsupported: this node cannot hold it.
            InvalidRequest: a value is wrong, or it can never fit here.
            CapacityUnavailable: not now; nothing was started.
            StartFailed: it could not be made; nothing of it is left.
        """
        owner = self._live.get(request.id)
        if owner is None:
            if known := self._ended.get(request.id):
                return _created_before(known)
            owner = await self._admit(request)
        with commands.deadline(READY_DEADLINE_S, "the creation"):
            await owner.ready.wait()
        if owner.failure is not None:
            raise owner.failure
        return owner.view()

    async def _admit(self, request: CreateOnEdge) -> Owner:
        if node_of(sandbox_id(request.id)) != self.node:
            raise InvalidRequest(f"{request.id} is an id of another node than {self.node}")
        backend = self._backend_for(request)
        environment = await self._images.environments.compose(_wanted(request.spec))
        await self._refresh_memory()
        if owner := self._live.get(request.id):
            return owner  # somebody else asked for the same meanwhile
        decide(self._facts(), self._config.limits, request.spec.limits)
        record = SandboxRecord(
            id=request.id,
            project=request.project,
            spec=request.spec,
            environment=environment,
            created_at=self._clock.now(),
            uid_base=self._uids.take(),
            directory=str(self._journal.directory(request.id)),
            socket=str(self._config.run / request.id),
            warnings=backend.warnings(request.spec),
        )
        owner = self._live[request.id] = Owner(record, backend, self._around())
        # The launch is the edge's, not the request's: a caller who leaves does not undo it, and the
        # next one with the same id finds it.
        self._around().group.start_soon(self._launch, owner)
        return owner

    def _backend_for(self, request: CreateOnEdge) -> Backend:
        backend = self._backends.get(request.spec.backend)
        if backend is None:
            raise Unsupported(
                f"this node has no backend {request.spec.backend}; it has "
                f"{', '.join(sorted(self._backends))}",
                backend=request.spec.backend,
            )
        backend.refuse(request.spec)
        return backend

    def _facts(self) -> NodeFacts:
        return NodeFacts(
            live=len(self._live),
            waiting=self._launching.statistics().tasks_waiting,
            memory_total_bytes=self._memory.total_bytes,
            memory_available_bytes=self._memory.available_bytes,
            cpus=hostinfo.cpus(),
            uid_runs_free=self._uids.free,
        )

    async def _launch(self, owner: Owner) -> None:
        environments, holder = self._images.environments, f"create-{owner.record.id}"
        try:
            # What comes over the network is fetched before its turn: a slow store holds up nobody
            # whose environment is here.
            with commands.deadline(FETCH_DEADLINE_S, "fetching its environment"):
                await environments.hold(
                    owner.record.environment, holder, trace=owner.record.spec.trace or ""
                )
            await self._launch_in_turn(owner)
        except Exception as exc:  # noqa: BLE001 - the edge outlives a bug in one creation
            self._give_up(owner, as_error(exc))
        finally:
            with anyio.CancelScope(shield=True):
                await environments.release(holder)

    async def _launch_in_turn(self, owner: Owner) -> None:
        with anyio.move_on_after(QUEUE_DEADLINE_S) as waiting:
            await self._launching.acquire_on_behalf_of(owner)
        if waiting.cancelled_caught:
            raise CapacityUnavailable(
                f"its turn did not come within {QUEUE_DEADLINE_S:.0f} s", limit=QUEUE_DEADLINE_S
            )
        try:
            await owner.create()
        finally:
            self._launching.release_on_behalf_of(owner)
        self._watch(owner)

    def _give_up(self, owner: Owner, failure: DsecError) -> None:
        """Nothing of it was made."""
        if owner.ready.is_set():
            return  # stopped while it waited: what is left of it is that stop's to settle
        owner.failure = failure
        self._drop(owner)
        owner.ready.set()

    async def get(self, sandbox: str) -> SandboxView:
        """Look at one, ended ones included while they are remembered. Raises NotFound."""
        if owner := self._live.get(sandbox_id(sandbox)):
            return owner.view()
        if view := self._ended.get(sandbox):
            return view
        raise _unknown(sandbox)

    async def list_sandboxes(self, matching: ListFilter) -> list[SandboxView]:
        """Look at all that match, newest first."""
        views = [*self._ended.all(), *(owner.view() for owner in self._live.values())]
        found = [view for view in views if _matches(view, matching)]
        return sorted(found, key=lambda view: view.created_at, reverse=True)

    async def stop(self, sandbox: str) -> SandboxView:
        """Stop it and wait until nothing of it is left. Harmless twice.

        Raises:
            NotFound: there is none. InternalError: something of it cannot be removed.
        """
        owner = self._live.get(sandbox_id(sandbox))
        if owner is not None:
            with commands.deadline(STOP_DEADLINE_S, "the stop"):
                await self._detached(partial(owner.stop, StopReason.REQUESTED))
        return await self.get(sandbox)

    async def owner(self, sandbox: str, *, awake: bool = True) -> Owner:  # noqa: ARG002
        """A sandbox to work with; waits while it is being created, and wakes one that is paused.

        Args:
            sandbox: its id.
            awake: False = leave a paused one paused.

        Raises:
            NotFound: there is none. SandboxGone: it is over. StartFailed: it never ran.
        """
        owner = self._live.get(sandbox_id(sandbox))
        if owner is None:
            if view := self._ended.get(sandbox):
                raise gone(sandbox, str(view.stop_reason or view.state), view.stop_detail)
            raise _unknown(sandbox)
        if not owner.ready.is_set():
            with commands.deadline(READY_DEADLINE_S, "the creation"):
                await owner.ready.wait()
            if owner.failure is not None:
                raise owner.failure
        return owner

    async def usage(self, sandbox: str) -> Usage:
        """What it uses, measured from outside. Raises NotFound, SandboxGone."""
        owner = await self.owner(sandbox)
        with owner.use():
            return await owner.usage()

    # its state

    async def pause(self, sandbox: str) -> SandboxView:
        """Freeze it and take back its memory. Harmless twice.

        Raises:
            NotFound, SandboxGone. Unsupported: this host cannot freeze it.
        """
        owner = await self.owner(sandbox, awake=False)
        await self._detached(owner.pause)
        return owner.view()

    async def resume(self, sandbox: str) -> SandboxView:
        """Have it go on. Harmless twice.

        Raises:
            NotFound, SandboxGone. CapacityUnavailable: the node has no room for it now.
        """
        return (await self.owner(sandbox)).view()

    async def resize(self, sandbox: str, change: Resize) -> SandboxView:
        """Give it other limits.

        Raises:
            NotFound, SandboxGone. InvalidRequest, Unsupported, Conflict: nothing has changed.
        """
        owner = await self.owner(sandbox, awake=False)
        await self._detached(partial(resizing.resize, owner, change))
        return owner.view()

    async def pack(self, sandbox: str, wanted: Pack, principal: str) -> SnapshotView:
        """Take a snapshot of what it has written, running or paused.

        Raises:
            NotFound, SandboxGone. Conflict: the project has a snapshot of that name.
            StorageFull: no room for it; nothing is left of it.
        """
        owner = await self.owner(sandbox, awake=False)
        return await packing.pack(self._images, owner, wanted, principal)

    async def diff(self, sandbox: str) -> list[DiffEntry]:
        """What it has written so far. Raises NotFound, SandboxGone."""
        return await packing.diff(self._images, await self.owner(sandbox, awake=False))

    def fork(
        self, sandbox: str, wanted: Fork, principal: str
    ) -> AbstractAsyncContextManager[AsyncIterator[BatchItem]]:
        """Make sandboxes that begin where this one stands. Raises NotFound, SandboxGone."""
        return forking.fork(self, sandbox, wanted, principal)

    def _users(self) -> Iterable[SandboxRecord]:
        return [owner.record for owner in self._live.values()]

    # time

    def _watch(self, owner: Owner) -> None:
        if owner.state is SandboxState.RUNNING:
            verdict = judge(self._times(owner))
            at = verdict.at if isinstance(verdict, Later) else self._clock.monotonic()
            self._ttl.watch(owner.record.id, at)

    def _times(self, owner: Owner) -> Times:
        spec, now = owner.record.spec, self._clock.monotonic()
        dies_at = None
        if spec.max_lifetime_s is not None:
            age = self._clock.now() - owner.record.created_at
            dies_at = now + spec.max_lifetime_s - age
        return Times(
            now=now,
            idle_since=None if owner.busy else owner.idle_since,
            idle_ttl_s=spec.ttl_running_stop,
            dies_at=dies_at,
        )

    async def _look(self, sandbox: str) -> float | None:
        """Look at a sandbox that may be due; when to look again."""
        owner = self._live.get(sandbox)
        if owner is None or owner.state is not SandboxState.RUNNING:
            return None
        verdict = judge(self._times(owner))
        if isinstance(verdict, AskCommands):
            verdict = await self._ask_commands(owner)
        if isinstance(verdict, Stop):
            await self._expire(owner, verdict.reason)
            return None
        return verdict.at

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

    async def _expire(self, owner: Owner, reason: StopReason) -> None:
        try:
            await self._detached(partial(owner.stop, reason))
        except DsecError:
            logger.exception("could not be stopped", extra={"sandbox_id": owner.record.id})

    # the end

    def _over(self, owner: Owner) -> None:
        self._drop(owner)
        self._ended.add(owner.view())
        self._trash.set()

    def _drop(self, owner: Owner) -> None:
        # Once only: a run of ids given back twice would be another sandbox's by then.
        if self._live.get(owner.record.id) is not owner:
            return
        del self._live[owner.record.id]
        self._uids.give_back(owner.record.uid_base)
        self._ttl.forget(owner.record.id)

    async def _empty_trash(self) -> None:
        while True:
            await self._trash.wait()
            self._trash = anyio.Event()
            try:
                await in_thread("disk", self._journal.empty_trash, abandon=True)
                await in_thread("disk", self._journal.unremember, self._ended.overdue())
            except Exception:  # it is tried again with the next one that ends
                logger.exception("the trash could not be emptied")

    async def _detached(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do it as the edge's own task: a caller who leaves does not stop it halfway."""
        done = anyio.Event()
        failure: DsecError | None = Unavailable("the edge is going down; ask again")

        async def run() -> None:
            nonlocal failure
            try:
                await work()
                failure = None
            except Exception as exc:  # noqa: BLE001 - the edge outlives a bug in one sandbox
                failure = as_error(exc)
            finally:
                done.set()  # cancelled, it did not happen

        if self._group is None:
            raise Unavailable("the edge is not running")
        self._group.start_soon(run)
        await done.wait()
        if failure is not None:
            raise failure


def _wanted(spec: SandboxSpec) -> EnvironmentRef:
    return EnvironmentRef(image=spec.image, workspace=spec.workspace, toolkits=spec.toolkits)


def _created_before(view: SandboxView) -> SandboxView:
    if view.stop_reason is StopReason.LAUNCH_FAILED:
        raise StartFailed(view.stop_detail or "it could not be started", sandbox=view.id)
    return view


def _matches(view: SandboxView, wanted: ListFilter) -> bool:
    return (
        (not wanted.project or view.project == wanted.project)
        and (not wanted.states or view.state in wanted.states)
        and all(view.labels.get(key) == value for key, value in wanted.labels.items())
    )


def _unknown(sandbox: str) -> NotFound:
    return NotFound(f"no sandbox {sandbox}", kind="sandbox", sandbox=sandbox)
