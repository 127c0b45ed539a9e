"""The edge's use cases: `dsec.wire.edge_v1.EdgeApi`, and finding a sandbox for an operation on it.

    async with EdgeService(config, backends, images, clock).running() as edge: ...

`running` starts the backends, sweeps what an earlier run left, and holds every task of the edge.
Sandboxes go on when it ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from functools import partial
from typing import TypeVar

import anyio
import anyio.abc
from typing_extensions import override

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
from dsec.edge import commands, networking, restoring
from dsec.edge.admission import NodeFacts, check_room, decide
from dsec.edge.asking import asked, check_rules
from dsec.edge.backends.interface import Backend
from dsec.edge.channel import gone
from dsec.edge.config import MAX_SOCKET_PATH, EdgeConfig
from dsec.edge.ended import Ended
from dsec.edge.expiry import Expiry
from dsec.edge.forking import Forks, Origin
from dsec.edge.going import going
from dsec.edge.histories import Histories
from dsec.edge.images import Images
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.lifecycle.surroundings import Surroundings
from dsec.edge.packing import Packer
from dsec.edge.record import SandboxRecord
from dsec.edge.recording import Recordings
from dsec.edge.recording_commands import RecordedCommands
from dsec.edge.retelling import Part, Retelling
from dsec.edge.shipping import Shipping
from dsec.edge.sweep import sweep
from dsec.edge.tamper_cases import TamperCases
from dsec.edge.uid_runs import UidRuns
from dsec.kit.blocking import in_thread
from dsec.kit.http import as_error
from dsec.linux import hostinfo
from dsec.wire.edge_v1 import (
    ASKED,
    PLAIN,
    CreateOnEdge,
    ListFilter,
    PauseOrder,
    SentTrajectory,
    StopOrder,
)
from dsec.wire.public_v1 import (
    Capability,
    EnvironmentRef,
    NodeView,
)
from dsec.wire.sandbox import (
    Recorded,
    SandboxSpec,
    SandboxView,
    Usage,
)

T = TypeVar("T")
logger = logging.getLogger("dsec.edge.service")

QUEUE_DEADLINE_S = 120.0
"""A creation that has not begun by then is refused: nothing was started, ask elsewhere."""
FETCH_DEADLINE_S = 120.0
READY_DEADLINE_S = 300.0
STOP_DEADLINE_S = 300.0
MEMORY_FRESH_S = 0.1


class EdgeService(TamperCases):
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
        super().__init__(images, Histories(config.state))
        self.node = node_id(config.node)
        if len(str(config.run)) + 24 > MAX_SOCKET_PATH:
            raise InvalidRequest(f"{config.run} is too long for the path of a Unix socket")
        self._config = config
        self._backends = {backend.name: backend for backend in backends}
        self._clock = clock
        self._capabilities = list(capabilities)
        self._services = config.services
        self._journal = Journal(config.state, after_write)
        self._live: dict[str, Owner] = {}
        self._paused: set[str] = set()
        self._ended = Ended(clock)
        self._uids = UidRuns(config.first_uid)
        self._expiry = Expiry(clock, self._live, self._detached)
        self._launching = anyio.CapacityLimiter(config.limits.max_launching)
        self._memory = hostinfo.Memory(0, 0, 0)
        self._memory_at = float("-inf")
        self._trash = anyio.Event()
        self._layers_may_go = False
        self._group: anyio.abc.TaskGroup | None = None
        self.recordings = Recordings(self._journal.trajectories, clock)
        self.commands = RecordedCommands(self.recordings, self.spawn)
        """Commands, each run once."""
        kept, store = self._journal.trajectories, config.store
        shipping = Shipping(store, kept, self._ended.project_of, clock) if store else None
        self._retelling = Retelling(self._journal, shipping)
        self._packer = Packer(images, self._backends, self._histories, clock, self.recordings.of)
        self._forks = Forks(self, images, self._packer, self._histories)

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
                self._group.start_soon(self._expiry.run)
                self._group.start_soon(self._empty_trash)
                self._group.start_soon(self._retelling.run)
                self._group.start_soon(self._sweep_histories)
                yield self
            finally:
                for owner in self._live.values():
                    owner.detach()
                self._group.cancel_scope.cancel()

    def _prepare(self) -> None:
        self._config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._config.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._journal.prepare()
        self._histories.prepare()
        for view in self._journal.endings():
            self._ended.add(view)
        self._journal.unremember(self._ended.overdue())
        self._journal.sweep_trajectories()
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
            self._expiry.watch(owner)
        self._images.environments.settled()
        self.layers_may_go()  # those of forks that were cut off
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
            admit=self._readmit,
            last_look=self._last_look,
            paused=self._paused,
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
                *self._services.capabilities(),
                *(entry for b in self._backends.values() for entry in b.capabilities()),
            ],
        )

    async def _refresh_memory(self) -> None:
        now = self._clock.monotonic()
        if now - self._memory_at >= MEMORY_FRESH_S:
            self._memory_at = now
            self._memory = await in_thread("scan", hostinfo.memory)

    # sandboxes

    async def create(self, request: CreateOnEdge, origin: Origin | None = None) -> SandboxView:
        """Create a sandbox and wait until it runs; the same id again is the same sandbox.

        Args:
            request: what is wanted, under which id.
            origin: what it begins with besides, if it is forked.

        Raises:
            NotFound: no such image. Unsupported: this node cannot hold it.
            PermissionDenied: its image is a snapshot with the residue of somebody else.
            InvalidRequest: a value is wrong, or it can never fit here.
            CapacityUnavailable: not now; nothing was started.
            StartFailed: it could not be made; nothing of it is left.
        """
        if known := await self.known(request.id):
            return known
        return await self._made(await self._admit(request, origin))

    async def known(self, sandbox: str) -> SandboxView | None:
        """A sandbox that was asked for before, once it runs; None if there was none.

        Raises:
            StartFailed: it could not be made.
        """
        if owner := self._live.get(sandbox):
            return await self._made(owner)
        view = self._ended.get(sandbox)
        return _created_before(view) if view else None

    async def _made(self, owner: Owner) -> SandboxView:
        with commands.deadline(READY_DEADLINE_S, "the creation"):
            await owner.ready.wait()
        if owner.failure is not None:
            raise owner.failure
        return owner.view()

    async def _admit(self, request: CreateOnEdge, origin: Origin | None) -> Owner:
        if node_of(sandbox_id(request.id)) != self.node:
            raise InvalidRequest(f"{request.id} is an id of another node than {self.node}")
        request, phase = asked(request, origin)
        backend = self._backend_for(request)
        said = await networking.check_all(request.spec, self._services)
        origin = origin or await restoring.origin(self._images, self._histories, request)
        environment = origin.environment
        if environment is None:
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
            warnings=backend.warnings(request.spec) + said,
            created_by=request.principal,
            parent=origin.parent,
            history=str(origin.history or ""),
            inherited=origin.inherited if origin.history else 0,
            unclean=origin.unclean,
            phase=phase,
        )
        if origin.parent:  # or what it was forked for could go before its launch begins
            self._images.environments.rebuild_pins([(_holder(record.id), environment.layers)])
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
        self._config.privileges.check(request.spec.security)
        check_rules(backend, request.spec)
        backend.refuse(request.spec)
        return backend

    def _facts(self) -> NodeFacts:
        return NodeFacts(
            live=len(self._live) - len(self._paused),
            waiting=self._launching.statistics().tasks_waiting,
            memory_total_bytes=self._memory.total_bytes,
            memory_available_bytes=self._memory.available_bytes,
            cpus=hostinfo.cpus(),
            uid_runs_free=self._uids.free,
        )

    async def _readmit(self, _record: SandboxRecord) -> None:
        """A paused sandbox has given up its place: there has to be one for it to go on."""
        await self._refresh_memory()
        check_room(self._facts(), self._config.limits)

    async def _launch(self, owner: Owner) -> None:
        environments, holder = self._images.environments, _holder(owner.record.id)
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
        self._expiry.watch(owner)

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

    async def stop(self, sandbox: str, order: StopOrder = ASKED) -> SandboxView:
        """Stop it and wait until nothing of it is left. Harmless twice.

        Raises:
            NotFound: there is none. InternalError: something of it cannot be removed.
        """
        owner = self._live.get(sandbox_id(sandbox))
        if owner is not None:
            with commands.deadline(STOP_DEADLINE_S, "the stop"):
                await self._detached(partial(owner.stop, order.reason, order.detail))
        return await self.get(sandbox)

    @override
    async def owner(self, sandbox: str, *, awake: bool = True) -> Owner:
        """A sandbox to work with; waits while it is being created, and wakes one that is paused.

        Args:
            sandbox: its id.
            awake: False = leave a paused one paused.

        Raises:
            NotFound: there is none. SandboxGone: it is over. StartFailed: it never ran.
            CapacityUnavailable: it is paused, and there is no room for it now.
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
        if awake:
            await owner.wake()
        return owner

    async def usage(self, sandbox: str) -> Usage:
        """What it uses, measured from outside; one that is paused stays so.

        Raises:
            NotFound, SandboxGone.
        """
        owner = await self.owner(sandbox, awake=False)
        if owner.ended_at is not None:
            raise owner.gone()
        return await owner.usage()

    # its state

    async def pause(self, sandbox: str, order: PauseOrder = PLAIN) -> SandboxView:
        """Freeze it and take back its memory. Harmless twice.

        Raises:
            NotFound, SandboxGone. Unsupported: this host cannot freeze it.
        """
        owner = await self.owner(sandbox, awake=False)
        await self._detached(partial(owner.pause, held=order.held))
        return owner.view()

    async def resume(self, sandbox: str) -> SandboxView:
        """Have it go on. Harmless twice.

        Raises:
            NotFound, SandboxGone. CapacityUnavailable: the node has no room for it now.
        """
        owner = await self.owner(sandbox, awake=False)
        await owner.wake(explicitly=True)
        return owner.view()

    @override
    def spawn(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """Do it as the edge's own task. Raises Unavailable: it is not running."""
        if self._group is None:
            raise Unavailable("the edge is not running")
        self._group.start_soon(work)

    def peek(self, sandbox: str) -> Owner | None:
        """A sandbox that runs or is paused; None: there is none, or it is not made yet."""
        owner = self._live.get(sandbox)
        made = owner is not None and owner.ready.is_set() and owner.failure is None
        return owner if made else None

    def trajectory(self, sandbox: str, part: Part, project: str) -> AsyncGenerator[Recorded, None]:
        """What has happened in it, in order; also when it is over. Raises as `Retelling.tell`."""
        name = sandbox_id(sandbox)
        asked = partial(going, self.commands, self._live.get(name))
        return self._retelling.tell(name, part, asked, project)

    async def sent_trajectory(self, sandbox: str) -> SentTrajectory:
        """Of one that is over, as the store has it. Raises NotFound, Unavailable."""
        return await self._retelling.sent(sandbox_id(sandbox))

    def remembers(self, sandbox: str) -> bool:
        """Whether there is or was that sandbox."""
        return sandbox in self._live or self._ended.get(sandbox) is not None

    def record_of(self, sandbox: str) -> SandboxRecord | None:
        """The facts of a sandbox that is not over."""
        owner = self._live.get(sandbox)
        return owner.record if owner else None

    def layers_may_go(self) -> None:
        """Layers that only forks needed may be needed no more: remove them when there is time."""
        self._layers_may_go = True
        self._trash.set()

    @override
    def _users(self) -> Iterable[SandboxRecord]:
        return [owner.record for owner in self._live.values()]

    # the end

    def _over(self, owner: Owner) -> None:
        self._retelling.wake()
        self._drop(owner)
        self._ended.add(owner.view())
        self._layers_may_go |= bool(owner.record.parent)
        self._trash.set()

    def _drop(self, owner: Owner) -> None:
        # Once only: a run of ids given back twice would be another sandbox's by then.
        if self._live.get(owner.record.id) is not owner:
            return
        del self._live[owner.record.id]
        self.recordings.forget(owner.record.id)
        self._uids.give_back(owner.record.uid_base)
        self._expiry.forget(owner.record.id)

    async def _empty_trash(self) -> None:
        while True:
            await self._trash.wait()
            self._trash = anyio.Event()
            try:
                await in_thread("disk", self._journal.empty_trash, abandon=True)
                await in_thread("disk", self._journal.unremember, self._ended.overdue())
                if self._layers_may_go:
                    self._layers_may_go = False
                    await self._images.collect()
            except Exception:  # it is tried again with the next one that ends
                logger.exception("the trash could not be emptied")

    @override
    async def _detached(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it as the edge's own task: a caller who leaves does not stop it halfway."""
        done = anyio.Event()
        made: list[T] = []
        failure: DsecError | None = Unavailable("the edge is going down; ask again")

        async def run() -> None:
            nonlocal failure
            try:
                made.append(await work())
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
        return made[0]


def _wanted(spec: SandboxSpec) -> EnvironmentRef:
    return EnvironmentRef(image=spec.image, workspace=spec.workspace, toolkits=spec.toolkits)


def _holder(sandbox: str) -> str:  # pins what a sandbox stands on until it does
    return f"create-{sandbox}"


def _created_before(view: SandboxView) -> SandboxView:
    if view.stop_reason is StopReason.LAUNCH_FAILED:
        raise StartFailed(view.stop_detail or "it could not be started", sandbox=view.id)
    return view


def _matches(view: SandboxView, wanted: ListFilter) -> bool:
    return (
        (not wanted.project or view.project == wanted.project)
        and (not wanted.job or view.job == wanted.job)
        and (not wanted.states or view.state in wanted.states)
        and all(view.labels.get(key) == value for key, value in wanted.labels.items())
    )


def _unknown(sandbox: str) -> NotFound:
    return NotFound(f"no sandbox {sandbox}", kind="sandbox", sandbox=sandbox)
