"""Writing down what a sandbox reads first, and fetching it ahead for the next one.

A recorded sandbox has mounts of its own (one superblock each, so nothing is in the page cache)
over devices of its own (so the filler knows whose reads they are). The trace is kept when the
window is over or the sandbox ends, whichever comes first.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct

from dsec.base.errors import DsecError
from dsec.images import disk
from dsec.images.devices import Devices
from dsec.images.layers import LayerStore
from dsec.images.records import Environment, check_digest, decode, encode
from dsec.images.traces import Trace, Traces, trace_key
from dsec.kit.blocking import in_thread
from dsec.kit.together import survive
from dsec.linux import mounts
from dsec.wire.filler import Prefetch, Recording

logger = logging.getLogger("dsec.images.recorder")

WINDOW_S = 120.0
_FACTS = "recording.json"


class Facts(Struct, kw_only=True):
    """`<run>/recordings/<sandbox>/recording.json`: what a restarted edge needs."""

    environment: Environment
    trace: str


@dataclass
class _Under:
    """A recording under way."""

    facts: Facts
    devices: frozenset[str]
    kept: bool = False
    turn: anyio.Lock = field(default_factory=anyio.Lock)


class Recorder:
    """The recordings of a node."""

    def __init__(
        self,
        run_dir: Path,
        layers: LayerStore,
        devices: Devices,
        traces: Traces,
        *,
        automatic: bool,
        tasks: TaskGroup,
    ) -> None:
        self._root = run_dir.absolute() / "recordings"
        self._layers = layers
        self._devices = devices
        self._traces = traces
        self._automatic = automatic
        self._tasks = tasks
        self._under: dict[str, _Under] = {}
        self._claimed: set[str] = set()

    def open(self) -> None:
        """Adopt what an earlier run of the edge began. Blocking.

        What cannot be adopted is logged, and goes with its sandbox: `release` needs no facts.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        self._root = self._root.resolve()  # as mountinfo has it
        for file in self._root.glob(f"*/{_FACTS}"):
            try:
                self._under[file.parent.name] = self._begun(
                    decode(file.read_bytes(), Facts, str(file))
                )
            except (DsecError, OSError) as error:
                extra = {"sandbox_id": file.parent.name, "why": str(error)}
                logger.warning("a recording cannot be gone on with", extra=extra)

    def go_on(self) -> None:
        """Let the windows of adopted recordings end too."""
        for sandbox in self._under:
            self._end_later(sandbox)

    def _end_later(self, sandbox: str) -> None:
        self._tasks.start_soon(survive, partial(self._keep_later, sandbox), "keeping a trace")

    @property
    def devices(self) -> set[str]:
        """Data that recorded sandboxes stand on."""
        return {device for under in self._under.values() for device in under.devices}

    def claim(self, environment: Environment, trace: str) -> bool:
        """Whether the caller is the one to record this environment: the first to ask."""
        key = trace_key(environment.layers, trace)
        if not self._automatic or key in self._claimed:
            return False
        self._claimed.add(key)
        return True

    def _begun(self, facts: Facts) -> _Under:
        layers = [self._layers.get(digest) for digest in facts.environment.layers]
        return _Under(facts, frozenset(device for layer in layers for device in layer.devices))

    async def mount(
        self, environment: Environment, wanted: Sequence[str], sandbox: str, trace: str
    ) -> list[Path]:
        """Mount layers for one sandbox alone and record its reads.

        Returns:
            The mounted directories, in the order of `wanted`.

        Raises:
            Unsupported: the node has no filler.
            Unavailable: the filler does not answer.
            OSError: the kernel refused.
        """
        under = await in_thread("disk", self._begun, Facts(environment=environment, trace=trace))
        place = self._root / sandbox
        await in_thread("disk", self._prepare, place, under.facts)
        self._under[sandbox] = under
        layers = [await in_thread("disk", self._layers.get, digest) for digest in wanted]
        digests = [device for layer in layers for device in layer.devices]
        paths = iter(await self._devices.record(sandbox, digests))
        found = []
        for layer in layers:
            target = place / check_digest(layer.digest).removeprefix("sha256:")
            devices = [next(paths) for _ in layer.devices]
            await in_thread("mount", self._mount_copy, layer.digest, target, devices)
            found.append(target)
        self._end_later(sandbox)
        return found

    def _prepare(self, place: Path, facts: Facts) -> None:
        place.mkdir(mode=0o700, exist_ok=True)
        (place / f"{_FACTS}.new").write_bytes(encode(facts))
        (place / f"{_FACTS}.new").replace(place / _FACTS)

    def _mount_copy(self, digest: str, target: Path, devices: Sequence[Path]) -> None:
        target.mkdir(mode=0o755, exist_ok=True)
        self._layers.mount_copy(digest, target, devices)

    async def _keep_later(self, sandbox: str) -> None:
        await anyio.sleep(WINDOW_S)
        await self._keep(sandbox)

    async def _keep(self, sandbox: str) -> None:
        """Keep what was read so far as the trace; once. A trace that is lost is no error."""
        under = self._under.get(sandbox)
        if under is None:
            return
        async with under.turn:
            if under.kept:
                return
            under.kept = True
            saved = False
            try:
                recording = await (await self._devices.filler()).recording(sandbox)
                saved = await self._save(under.facts, recording)
            except (DsecError, OSError) as error:
                logger.warning("a trace was lost", extra={"sandbox_id": sandbox, "why": str(error)})
            if not saved:  # the next sandbox of this environment shall record it
                facts = under.facts
                self._claimed.discard(trace_key(facts.environment.layers, facts.trace))

    async def _save(self, facts: Facts, recording: Recording) -> bool:
        if not recording.spans:  # of a sandbox that never ran there is nothing to learn
            return False
        await self._traces.save(facts.environment, facts.trace, recording)
        return True

    async def release(self, sandbox: str) -> None:
        """A recorded sandbox is over: keep its trace, take its mounts and devices away.

        Harmless for others, and twice.

        Raises:
            OSError: a mount cannot be taken away.
        """
        place = self._root / sandbox
        if sandbox not in self._under and not place.exists():  # one stat
            return
        await self._keep(sandbox)
        await in_thread("mount", _unmount_all, place)
        with contextlib.suppress(DsecError):
            await (await self._devices.filler()).end_recording(sandbox)
        self._under.pop(sandbox, None)

    async def prefetch(self, trace: Trace) -> None:
        """Have the filler fetch what a trace tells of. Never raises: it only helps."""
        recording = trace.recording
        spans: dict[int, list[tuple[int, int]]] = {}
        for span in recording.spans:
            spans.setdefault(span.device, []).append((span.first, span.count))
        for device, wanted in spans.items():
            with contextlib.suppress(DsecError, IndexError):
                digest = recording.digests[device]
                await self._devices.prefetch(Prefetch(digest=digest, spans=wanted))


def _unmount_all(place: Path) -> None:
    for mount in mounts.mounts_under(place):
        mounts.umount(Path(mount.target), detach=True)
    disk.remove_tree(place)
