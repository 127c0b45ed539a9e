"""A sandbox's writable layer into a layer of the store, while the sandbox runs.

A child process takes a tenth of a second to begin, so what is small is packed in threads; what turns
out to be large goes to a child (`packing_child`), which begins anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, InternalError, NotFound, PayloadTooLarge
from dsec.images.children import Refused, run_child
from dsec.images.importer import Import, Importer
from dsec.images.layers import LayerStore
from dsec.images.oci.layer import Limits
from dsec.images.packer import Packed, Packer
from dsec.images.packing_child import GO, JOB, Finished, Looked, PackJob, Said, Taken
from dsec.images.records import (
    DIFFERENCE,
    Environment,
    EnvironmentPart,
    LayerRecord,
    is_difference,
)
from dsec.images.residue import Sieve
from dsec.kit.blocking import in_thread
from dsec.wire.sandbox import Pack

SMALL = Limits(entries=5_000, size_bytes=64 << 20)
GROWN = Limits(entries=4 * SMALL.entries, size_bytes=4 * SMALL.size_bytes)
"""What was small may have become this meanwhile, and is still packed in threads."""
MAX_STACKED = 8
"""Differences over each other; of more, metadata is merged into one."""
_TIMEOUT_S = 6 * 3600.0


class Worker(Protocol):
    """Who packs; see `Packer`. Each step raises what that raises."""

    async def look(self) -> None:
        """First pass."""
        ...

    async def take(self) -> None:
        """Second pass."""
        ...

    async def finish(self) -> Packed:
        """Make the layer."""
        ...


class InThreads:
    """In threads of this process: no more than `SMALL` at first, and then no more than `GROWN`."""

    def __init__(self, packer: Packer, limits: Limits) -> None:
        self._packer = packer
        self._limits = limits

    async def look(self) -> None:
        """First pass. Raises PayloadTooLarge: it is not small."""
        self._allow(SMALL)
        await in_thread("look", self._packer.look)

    async def take(self) -> None:
        """Second pass: others' first ones are not waited for.

        Raises:
            PayloadTooLarge: it is not small any more.
        """
        self._allow(GROWN)
        await in_thread("take", self._packer.take)

    def _allow(self, limits: Limits) -> None:
        entries = min(limits.entries, self._limits.entries)
        self._packer.allow(Limits(entries, min(limits.size_bytes, self._limits.size_bytes)))

    async def finish(self) -> Packed:
        """Make the layer."""
        return await in_thread("take", self._packer.finish)


class InChild:
    """In a child process, which ends with the context `opened`."""

    def __init__(self, out: Path, upper: Path, job: PackJob) -> None:
        self._out = out
        self._upper = upper
        self._job = job
        self._scope = anyio.CancelScope()
        self._looked, self._taken, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        self._packed: Packed | None = None
        self._failure: DsecError | None = None
        self._go = -1

    @contextlib.asynccontextmanager
    async def opened(self, tasks: TaskGroup) -> AsyncIterator[InChild]:
        """Have the child; leaving kills it."""
        await in_thread("disk", self._prepare)
        tasks.start_soon(self._run)
        try:
            yield self
        finally:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
            os.close(self._go)

    def _prepare(self) -> None:
        self._out.mkdir(mode=0o700)
        (self._out / JOB).write_bytes(msgspec.json.encode(self._job))
        os.mkfifo(self._out / GO, 0o600)
        # Open at both ends: neither this nor the child waits for the other to open it.
        self._go = os.open(self._out / GO, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    async def _run(self) -> None:
        arguments = ["--out", str(self._out), "--upper", str(self._upper)]
        try:
            with self._scope:
                await run_child(
                    "dsec.images.packing_child",
                    arguments,
                    timeout_s=_TIMEOUT_S,
                    on_line=self._hear,
                )
        except Exception as failure:  # noqa: BLE001 - told to who packs, not to all the node does
            self._failure = self._failure or InternalError(f"packing failed: {failure}")
        finally:
            for event in (self._looked, self._taken, self._ended):
                event.set()

    def _hear(self, line: str) -> None:
        said = msgspec.json.decode(line.encode(), type=Said)
        match said:
            case Looked():
                self._looked.set()
            case Taken():
                self._taken.set()
            case Finished():
                self._packed = Packed(said.meta, said.left_out)
            case Refused():
                self._failure = said.error()

    async def look(self) -> None:
        """First pass."""
        await self._reached(self._looked)

    async def take(self) -> None:
        """Second pass."""
        os.write(self._go, b"\n")  # never blocks: the pipe is empty
        await self._reached(self._taken)

    async def finish(self) -> Packed:
        """Make the layer."""
        await self._reached(self._ended)
        if self._packed is None:
            raise InternalError("a child that packs said nothing")
        return self._packed

    async def _reached(self, event: anyio.Event) -> None:
        await event.wait()
        if self._failure is not None:
            raise self._failure
        if self._ended.is_set() and self._packed is None:
            raise InternalError("a child that packs ended early")


class Packing:
    """One difference on its way; answers `dsec.edge.images.Packing`, but for `keep`."""

    def __init__(  # noqa: PLR0913 - the parts it ties together
        self,
        importer: Importer,
        layers: LayerStore,
        work: Import,
        writable: Path,
        environment: Environment,
        wanted: Pack,
        *,
        limits: Limits,
        tasks: TaskGroup,
        clock: Clock,
    ) -> None:
        self.wanted = wanted
        self.environment = environment
        self.work = work
        self.began = clock.monotonic()
        self._importer = importer
        self._layers = layers
        self._writable = writable
        self._limits = limits
        self._tasks = tasks
        self._open = contextlib.AsyncExitStack()
        self._worker: Worker | None = None
        self._is_large = False
        self._out = Path()
        self._packed: Packed | None = None

    async def aclose(self) -> None:
        """Let go of the directory; a child is killed."""
        await self._open.aclose()

    # -- the passes -----------------------------------------------------------------------------

    async def look(self) -> None:
        """First pass, while the sandbox runs.

        Raises:
            InvalidRequest: it cannot be a layer, or a glob is too long.
            PayloadTooLarge: it holds more than a layer may.
            StorageFull: no room.
        """
        if not self._is_large:
            self._worker = await self._in_threads()
            try:
                return await self._worker.look()
            except PayloadTooLarge:
                self._is_large = True
        await self._open.aclose()
        self._worker = await self._in_child()
        return await self._worker.look()

    async def _in_threads(self) -> Worker:
        self._out = self.work.fresh("difference")
        await in_thread("disk", partial(self._out.mkdir, mode=0o700))
        sieve = Sieve(clean=self.wanted.clean, exclude=self.wanted.exclude)
        packer = Packer(self._out, self._writable, sieve, self._limits)
        return InThreads(self._open.enter_context(packer), self._limits)

    async def _in_child(self) -> Worker:
        self._out = self.work.fresh("difference")
        job = PackJob(
            clean=self.wanted.clean,
            exclude=self.wanted.exclude,
            entries=self._limits.entries,
            size_bytes=self._limits.size_bytes,
        )
        child = InChild(self._out, self._writable, job)
        return await self._open.enter_async_context(child.opened(self._tasks))

    async def take(self) -> bool:
        """Second pass, while it stands still. Raises as `look`.

        Returns:
            Whether it was done. If not, so much has come that another first pass is due, in a child.
        """
        if self._worker is None:
            self._worker = await self._in_threads()
        try:
            await self._worker.take()
        except PayloadTooLarge:
            if self._is_large:
                raise
            self._is_large = True
            return False
        return True

    # -- the layer ------------------------------------------------------------------------------

    @property
    def left_out(self) -> int:
        """Entries that are not in the layer."""
        return self._packed.left_out if self._packed else 0

    async def put(self, *, sync: bool) -> LayerRecord:
        """Put it into the store of layers; pinned as long as this lasts.

        Args:
            sync: whether it is to outlive a crash of the host.

        Raises:
            StorageFull: no room; nothing of it is left.
        """
        if self._worker is None:
            raise InternalError("a difference is put that was not taken")
        self._packed = await self._worker.finish()
        source = f"difference over {self.environment.image.name}"
        return await self._importer.put(
            self.work, source, self._packed.converted, self._out, sync=sync
        )

    async def layer(self) -> str:
        """Put it into the store of layers; its digest. Hold it before this is left.

        Raises:
            StorageFull: no room.
        """
        return (await self.put(sync=False)).digest

    async def over(self, digest: str) -> Environment:
        """What a sandbox stands on that begins with the layer, all of it pinned as the layer is.

        Raises:
            StorageFull: no room.
        """
        parts = await self.stacked(digest)
        return msgspec.structs.replace(self.environment, parts=parts)

    async def stacked(self, digest: str) -> list[EnvironmentPart]:
        """The environment's parts with the layer on top. Raises as `over`."""
        below, differences = split(self.environment.parts)
        run = [*differences, digest]
        if len(run) > MAX_STACKED:
            self._layers.pins.pin(run, self.work.owner)
            run = await self._importer.merge(self.work, run, "differences")
        return [*below, EnvironmentPart(label=DIFFERENCE, layers=run)]


def split(parts: Sequence[EnvironmentPart]) -> tuple[list[EnvironmentPart], list[str]]:
    """What an environment's last differences lie over, and those."""
    below = list(parts)
    differences: list[str] = []
    while below and is_difference(below[-1]):
        differences[:0] = below.pop().layers
    return below, differences


def alone(layers: LayerStore, digest: str) -> list[str]:
    """The layers one is merged of, as far as they are here; bottom first."""
    with contextlib.suppress(NotFound):
        merged = layers.get(digest).merged
        if merged and all(layers.has(part) for part in merged):
            return [single for part in merged for single in alone(layers, part)]
    return [digest]


def depth_of(layers: LayerStore, parts: Sequence[EnvironmentPart]) -> int:
    """Differences in an environment, each by itself."""
    mounts = [d for part in parts if is_difference(part) for d in part.layers]
    return sum(_count(layers, digest) for digest in mounts)


def _count(layers: LayerStore, digest: str) -> int:
    with contextlib.suppress(NotFound):
        if merged := layers.get(digest).merged:
            return sum(_count(layers, part) for part in merged)
    return 1
