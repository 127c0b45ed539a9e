"""pack_diff: snapshots of what sandboxes have written.

The sandbox is looked at while it runs, and stands still only for what changed since: its files are
those of one moment. What is packed then is put into a layer while it runs again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio

from dsec.base.clock import Clock
from dsec.base.errors import (
    Conflict,
    DsecError,
    NotFound,
    SandboxGone,
    Unavailable,
    Unsupported,
)
from dsec.edge.backends.interface import Backend
from dsec.edge.file_rules import without_denied
from dsec.edge.histories import TRAJECTORY, Histories
from dsec.edge.images import Images, Packing, SnapshotFacts
from dsec.edge.lifecycle import resting
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.recording import Recording
from dsec.images import disk
from dsec.images.residue import check_excludes
from dsec.kit.blocking import in_thread
from dsec.kit.flights import Flights
from dsec.wire.sandbox import DiffEntry, Pack, SnapshotView

NAME_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What a sandbox had written at one moment, on its way into a layer."""

    packing: Packing
    step: int
    """Entries of its trajectory at that moment."""
    frozen_ms: float


class Packer:
    """What sandboxes of a node have written, packed."""

    def __init__(
        self,
        images: Images,
        backends: Mapping[str, Backend],
        histories: Histories,
        clock: Clock,
        recording: Callable[[Owner], Awaitable[Recording]],
    ) -> None:
        """Put it together.

        Args:
            images: of the node.
            backends: by name.
            histories: of its snapshots.
            clock: what time it is.
            recording: a sandbox's trajectory.
        """
        self._images = images
        self._backends = backends
        self._histories = histories
        self._clock = clock
        self._recording = recording
        self._turns = Flights()

    async def pack(self, owner: Owner, wanted: Pack, principal: str) -> SnapshotView:
        """Take a snapshot, of a running or a paused sandbox.

        Raises:
            SandboxGone: it is over. Unsupported: it has no writable layer to pack.
            Conflict: the project has a snapshot of that name.
            InvalidRequest: an odd glob. StorageFull: no room; nothing is left of it.
        """
        begun = self._clock.monotonic()
        check_excludes(wanted.exclude)
        wanted = without_denied(wanted, owner.record.spec.files)
        await self._check_name(owner.record.project, wanted.name)
        async with self.taken(owner, wanted) as taken:
            view = await self._kept(owner, wanted, principal, taken)
        view.duration_ms = _ms(self._clock.monotonic() - begun)
        return view

    async def _kept(self, owner: Owner, wanted: Pack, principal: str, taken: Taken) -> SnapshotView:
        record = owner.record
        facts = SnapshotFacts(
            project=record.project,
            name=wanted.name,
            sandbox=record.id,
            step=taken.step,
            packed_by=principal,
            description=wanted.description,
            frozen_ms=taken.frozen_ms,
            unclean=record.unclean,
        )
        # The history first: a snapshot that can be seen has it. What a crash leaves is swept.
        with _over_if_gone(owner), disk.full_disk_named(record.path.parent):
            is_new = await in_thread(
                "disk",
                self._histories.keep,
                record.path / TRAJECTORY,
                record.project,
                wanted.name,
                record.id,
                taken.step,
            )
        try:
            return await taken.packing.keep(facts)
        except Exception:
            if is_new and not await self._is_kept(facts):
                await in_thread("disk", self._histories.drop, facts)
            raise

    async def _check_name(self, project: str, name: str) -> None:
        """Before anything is done for it, as far as it can be told soon: `keep` says it for sure."""
        with contextlib.suppress(NotFound, Unavailable), anyio.move_on_after(NAME_PATIENCE_S):
            await self._images.snapshots.get(project, name)
            raise Conflict(f"there is a snapshot {name} in project {project}", kind="snapshot")

    async def _is_kept(self, facts: SnapshotFacts) -> bool:
        """Whether the snapshot is there all the same; also True if nobody can tell."""
        try:
            known = await self._images.snapshots.get(facts.project, facts.name)
        except NotFound:
            return False
        except DsecError:
            return True
        return (known.sandbox, known.step) == (facts.sandbox, facts.step)

    @contextlib.asynccontextmanager
    async def taken(self, owner: Owner, wanted: Pack) -> AsyncIterator[Taken]:
        """Pack as far as the sandbox is needed; inside, it runs again. One at a time per sandbox.

        Raises:
            SandboxGone: it is over. Conflict: it is held in its pause. Unsupported, StorageFull.
        """
        resting.check_wakes(owner.record.id, owner.paused)
        backend = self._backends[owner.record.spec.backend]
        async with self._turns.alone(owner.record.id):
            writable = writable_layer(backend, owner)
            environment = owner.record.environment
            async with self._images.snapshots.packing(writable, environment, wanted) as packing:
                with _over_if_gone(owner):
                    taken = await self._take(owner, packing)
                yield taken

    async def _take(self, owner: Owner, packing: Packing) -> Taken:
        frozen_s = 0.0
        recording = await self._recording(owner)  # before it stands still: it may have to be read
        while True:
            await _while_it_lives(owner, packing.look)
            begun = self._clock.monotonic()
            async with owner.still():
                resting.check_wakes(owner.record.id, owner.paused)  # it may be since the look
                step = recording.steps
                is_done = await packing.take()
            frozen_s += self._clock.monotonic() - begun
            if is_done:
                return Taken(packing, step, _ms(frozen_s))

    async def diff(self, owner: Owner) -> list[DiffEntry]:
        """What it has written so far; it runs on meanwhile.

        Raises:
            SandboxGone: it is over. Unsupported: it has no writable layer.
        """
        record = owner.record
        writable = writable_layer(self._backends[record.spec.backend], owner)
        with _over_if_gone(owner):
            return await self._images.snapshots.diff(writable, record.environment)


def writable_layer(backend: Backend, owner: Owner) -> Path:
    """Where a sandbox's writes are.

    Raises:
        SandboxGone: it is over. Unsupported: nowhere that could be packed.
    """
    if owner.ended_at is not None:
        raise owner.gone()
    writable = backend.writable(owner.record)
    if writable is None:
        raise Unsupported(
            f"the {backend.name} backend keeps no writable layer of {owner.record.id} on a disk: "
            "there is nothing to pack, compare or fork",
            backend=backend.name,
        )
    return writable


async def _while_it_lives(owner: Owner, work: Callable[[], Awaitable[None]]) -> None:
    """Do some work, or give it up when the sandbox is over. Raises SandboxGone."""
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_when_over, owner, group.cancel_scope)
        try:
            await work()
        except Exception as exc:  # noqa: BLE001 - raised outside, or the group would wrap it
            failure = exc
        group.cancel_scope.cancel()
    if owner.ended_at is not None:
        raise owner.gone() from failure
    if failure is not None:
        raise failure


async def _cancel_when_over(owner: Owner, scope: anyio.CancelScope) -> None:
    await owner.over.wait()
    scope.cancel()


@contextlib.contextmanager
def _over_if_gone(owner: Owner) -> Iterator[None]:
    """Say that the sandbox is over, whatever fails when its files go under one's hands."""
    try:
        yield
    except Exception as exc:
        if owner.ended_at is None or isinstance(exc, SandboxGone):
            raise
        raise owner.gone() from exc


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
