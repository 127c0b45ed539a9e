"""Forks: sandboxes that begin where another stands.

What the parent has written becomes one more read-only layer, which all children stand on: their
files are its files at one moment. Processes are not copied, nor what only they have.

A fork is a task of the edge's own. A caller who leaves gives up the children not begun yet; with a
key, asking again makes those and finds the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import anyio.abc
from msgspec.structs import replace

from dsec.base.errors import Conflict, DsecError, Unavailable
from dsec.base.ids import NodeId, SandboxId, child_id, mint_sandbox_id, sandbox_id
from dsec.edge.commands import deadline
from dsec.edge.histories import TRAJECTORY, Histories, check_room, copy_history
from dsec.edge.images import Images
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.packing import Packer
from dsec.edge.record import SandboxRecord
from dsec.images import disk
from dsec.images.records import Environment
from dsec.kit.blocking import in_thread
from dsec.kit.flights import Flights
from dsec.kit.http import as_error, error_body
from dsec.wire.edge_v1 import CreateOnEdge
from dsec.wire.public_v1 import BatchItem
from dsec.wire.sandbox import Fork, Pack, SandboxSpec, SandboxView

JOB_DEADLINE_S = 300.0
"""A fork for a job takes no longer: whoever removes what is left of a job that changed hands looks
for late ones as long as for any creation."""
AT_ONCE = 16
"""Children of one fork on their way; more would only wait for the same processors."""
_WHOLE = Pack(name="fork", clean=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a sandbox begins with that is not made of its specification."""

    environment: Environment | None = None
    """What it stands on; None = what its specification names."""
    parent: str = ""
    """The sandbox it is forked from."""
    history: Path | None = None
    """The trajectory it begins with."""
    inherited: int = 0
    """How many entries of that."""
    phase: str = ""
    """The phase it begins in; "" = the first of its specification."""
    unclean: bool = False
    """There is residue in what it stands on."""


class Births(Protocol):
    """What a fork needs of the edge."""

    node: NodeId

    def spawn(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """Do it as the edge's own task. Raises Unavailable."""
        ...

    def remembers(self, sandbox: str) -> bool:
        """Whether there is or was that sandbox."""
        ...

    def record_of(self, sandbox: str) -> SandboxRecord | None:
        """The facts of a sandbox that is not over."""
        ...

    def peek(self, sandbox: str) -> Owner | None:
        """A sandbox that runs or is paused."""
        ...

    def layers_may_go(self) -> None:
        """Layers may be needed no more."""
        ...

    async def owner(self, sandbox: str, *, awake: bool = True) -> Owner:
        """A sandbox to work with. Raises NotFound, SandboxGone."""
        ...

    async def known(self, sandbox: str) -> SandboxView | None:
        """A sandbox that was asked for before, once it runs. Raises StartFailed."""
        ...

    async def create(self, request: CreateOnEdge, origin: Origin | None = None) -> SandboxView:
        """Make one; raises as `EdgeApi.create`."""
        ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all children of a fork have in common."""

    like: CreateOnEdge
    """The request for each, but for the id."""
    origin: Origin


class Forks:
    """The forks of a node."""

    def __init__(
        self, births: Births, images: Images, packer: Packer, histories: Histories
    ) -> None:
        self.births = births
        self.images = images
        self.packer = packer
        self.histories = histories
        self.keys = Flights()

    def fork(
        self, sandbox: str, wanted: Fork, principal: str
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[BatchItem]]:
        """Make children; within the context, each comes when it runs or has failed.

        Raises (when it is listened to):
            NotFound, SandboxGone: there is no such parent. Unsupported: it has nothing to fork.
            StorageFull: no room for what it has written; no child was made.
            DeadlineExceeded: it is a job's, and took too long; with a key, ask again for the rest.
        """
        return _Fork(self, sandbox_id(sandbox), wanted, principal).items()


class _Fork:
    """One fork under way."""

    def __init__(self, forks: Forks, sandbox: SandboxId, wanted: Fork, principal: str) -> None:
        self._forks = forks
        self._births = forks.births
        self._sandbox = sandbox
        self._wanted = wanted
        self._principal = principal
        self._parent = forks.births.peek(sandbox)
        """None: it is not made yet, or over already and living children say what the rest are."""
        self._failure: DsecError | None = Unavailable("the edge is going down; ask again")
        # As large as the fork: nobody waits for a slow reader, and a departed one shows.
        self._said, self._heard = anyio.create_memory_object_stream[BatchItem](wanted.count)

    @contextlib.asynccontextmanager
    async def items(self) -> AsyncIterator[AsyncIterator[BatchItem]]:
        """Begin, and hear of it."""
        self._births.spawn(self._run)
        async with self._heard:
            yield self._listen()

    async def _listen(self) -> AsyncIterator[BatchItem]:
        async for item in self._heard:
            yield item
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        try:
            # The same key twice at once: the second finds what the first has made.
            async with self._forks.keys.alone((self._sandbox, self._wanted.key or self)):
                with self._in_time():
                    await self._make()
            self._failure = None
        except Exception as exc:  # noqa: BLE001 - the edge outlives a bug in one fork
            self._failure = as_error(exc)
        finally:
            self._said.close()

    def _in_time(self) -> contextlib.AbstractContextManager[None]:
        if self._parent is not None and self._parent.record.spec.job is None:
            return contextlib.nullcontext()
        return deadline(JOB_DEADLINE_S, "the fork")

    async def _make(self) -> None:
        children = self._children()
        async with contextlib.AsyncExitStack() as held:
            plan = None
            if not all(self._births.remembers(child) for child in children):
                plan = await self._plan(children, held)
                await self._check_room(children, plan)
            await self._begin_all(children, plan)

    async def _check_room(self, children: list[SandboxId], plan: _Plan | None) -> None:
        if plan is not None and plan.origin.history is not None:
            copies = sum(not self._births.remembers(child) for child in children)
            await in_thread("disk", check_room, plan.origin.history, copies)

    def _children(self) -> list[SandboxId]:
        node, key = self._births.node, self._wanted.key
        count = range(self._wanted.count)
        if not key:
            return [mint_sandbox_id(node) for _ in count]
        return [child_id(self._sandbox, key, index) for index in count]

    async def _plan(
        self, children: list[SandboxId], held: contextlib.AsyncExitStack
    ) -> _Plan | None:
        """What the children are made of, kept until `held` lets go of it; None: that is gone."""
        holder = f"fork-{mint_sandbox_id(self._births.node)}"
        history = self._forks.histories.scratch(holder)
        held.push_async_callback(self._let_go, holder, history)
        for child in children:
            if sibling := self._births.record_of(child):
                return await self._as_sibling(sibling, holder, history)
        if any(self._births.remembers(child) for child in children):
            return None
        return await self._packed(holder, history)

    async def _as_sibling(self, sibling: SandboxRecord, holder: str, history: Path) -> _Plan:
        """A repeat begins the rest where the children that live began."""
        await self._forks.images.environments.hold(sibling.environment, holder)
        await _copy(sibling, sibling.inherited, history)
        return self._planned(sibling, sibling.spec, sibling.environment, history, sibling.inherited)

    async def _packed(self, holder: str, history: Path) -> _Plan:
        """The parent as it stands."""
        owner = self._parent = await self._births.owner(self._sandbox, awake=False)
        parent = owner.record
        async with self._forks.packer.taken(owner, _WHOLE) as taken:
            environment = await taken.packing.over(await taken.packing.layer())
            await self._forks.images.environments.hold(environment, holder)
        await _copy(parent, taken.step, history)
        labels = parent.spec.labels if self._wanted.labels is None else self._wanted.labels
        spec = replace(parent.spec, labels=labels, hostname=None)
        return self._planned(parent, spec, environment, history, taken.step)

    def _planned(
        self,
        of: SandboxRecord,
        spec: SandboxSpec,
        environment: Environment,
        history: Path,
        inherited: int,
    ) -> _Plan:
        like = CreateOnEdge(id="", project=of.project, spec=spec, principal=self._principal)
        origin = Origin(
            environment=environment,
            parent=self._sandbox,
            history=history,
            inherited=inherited,
            phase=of.phase,
            unclean=True,
        )
        return _Plan(like, origin)

    async def _let_go(self, holder: str, history: Path) -> None:
        with anyio.CancelScope(shield=True):
            await self._forks.images.environments.release(holder)
            await in_thread("disk", partial(history.unlink, missing_ok=True))
            self._births.layers_may_go()

    async def _begin_all(self, children: list[SandboxId], plan: _Plan | None) -> None:
        numbered = iter(enumerate(children))

        async def worker() -> None:
            for index, child in numbered:
                if not self._heard_of:
                    return
                item = await self._begin(index, child, plan)
                with contextlib.suppress(anyio.BrokenResourceError):
                    self._said.send_nowait(item)

        async with anyio.create_task_group() as group:
            for _ in range(min(AT_ONCE, len(children))):
                group.start_soon(worker)

    @property
    def _heard_of(self) -> bool:
        return self._said.statistics().open_receive_streams > 0

    async def _begin(self, index: int, child: SandboxId, plan: _Plan | None) -> BatchItem:
        try:
            view = await self._births.known(child)
            if view is None:
                view = await self._create(child, plan)
            return BatchItem(index=index, sandbox=view)
        except Exception as exc:  # noqa: BLE001 - one that fails does not end the others
            return BatchItem(index=index, error=error_body(as_error(exc)).error)

    async def _create(self, child: SandboxId, plan: _Plan | None) -> SandboxView:
        if self._parent is not None and self._parent.ended_at is not None:
            raise self._parent.gone()
        if plan is None:
            raise _too_late()
        return await self._births.create(replace(plan.like, id=child), plan.origin)


def _too_late() -> Conflict:
    return Conflict(
        "it was not made with the others of this fork, which are over, and what they began with is "
        "gone; fork under another key",
        kind="fork",
    )


async def _copy(record: SandboxRecord, step: int, history: Path) -> None:
    """The first entries of a sandbox's trajectory, which may go with it while children are made."""
    with disk.full_disk_named(history.parent):
        await in_thread("disk", copy_history, record.path / TRAJECTORY, step, history)
