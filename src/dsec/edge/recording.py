"""What happens in the sandboxes of a node, recorded in their trajectories (`dsec.trajectory`).

    recording = await recordings.of(owner)
    seq = await recording.begin("file.move", caller=..., args=...)
    ... the operation ...
    await recording.end(seq, "ok", result)

A sandbox nobody has used since the edge started costs nothing here: its file is read when it is
used. Written means written to the kernel: a killed edge leaves the page cache behind, and a host
that went down has lost its sandboxes anyway (docs/adr/0020, 0026).
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import anyio

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, StorageFull
from dsec.edge.appending import Appender
from dsec.edge.channel import AetherChannel
from dsec.edge.histories import TRAJECTORY
from dsec.edge.lifecycle.owner import Owner
from dsec.images import disk
from dsec.kit.blocking import in_thread
from dsec.kit.flights import Flights
from dsec.trajectory import writer
from dsec.trajectory.format import Begun, Ended, frame
from dsec.trajectory.index import Index, entries, load, name_of
from dsec.wire.sandbox import Captured

logger = logging.getLogger("dsec.edge.recording")

MAX_BYTES = 256 << 20
"""Of one sandbox's file; beyond it outputs, long arguments and results are left out."""
FULL_BYTES = MAX_BYTES + (64 << 20)
"""Beyond it nothing is recorded but what has an id of its own, which has to be known again."""
MAX_IDS = 500_000
"""Known by their ids in memory, over all sandboxes; the rest is read again when it is wanted."""
NOT_RECORDED = "its trajectory is full: of what is done now only operations with an id are recorded"
SPARED = {"left_out": "the trajectory has reached its size limit"}


class Known(NamedTuple):
    """An operation that was recorded before."""

    seq: int
    begun: Begun | None
    ended: Ended | None
    """None: it goes on, or nobody knows how it ended."""


class Recording:
    """The trajectory of one live sandbox, as the edge adds to it."""

    __slots__ = (
        "__weakref__",
        "_appender",
        "_beginning",
        "_clock",
        "_ending",
        "_kept",
        "_owner",
        "_unwritten",
        "before",
        "heard",
        "hearing",
        "index",
        "trying",
        "turns",
    )

    def __init__(
        self, owner: Owner, kept: Path, index: Index, appender: Appender, clock: Clock
    ) -> None:
        self._owner = owner
        self._kept = kept
        self._appender = appender
        self._clock = clock
        self._beginning: dict[str, anyio.Event] = {}
        self._ending: dict[int, anyio.Event] = {}
        self._unwritten = False
        """Whether an end could not be written."""
        self.index = index
        self.before = index.last
        """The last operation of former lives of the edge: of those without an end, only commands can
        be going on. Nobody was at one of this life when it was read, or it would not have been."""
        self.turns = Flights()
        """One thing at a time under an idempotency key."""
        self.heard: AetherChannel | None = None
        """The connection on which the ends of running commands are awaited."""
        self.hearing: dict[int, AetherChannel] = {}
        """Commands whose end is awaited by nobody but the record, and on which connection."""
        self.trying: dict[int, int] = {}
        """How many callers are asking aether for a command."""

    @property
    def busy(self) -> bool:
        """Whether it has to stay in memory although nobody is at it."""
        return bool(self.turns or self._ending or self.index.running)

    async def begin(
        self,
        op: str,
        *,
        ident: str = "",
        caller: str = "",
        args: dict[str, Any] | None = None,
        digest: bytes = b"",
    ) -> int:
        """Record that an operation has reached the sandbox; its number.

        Raises:
            SandboxGone: it is over. StorageFull: it could not be recorded.
        """
        if self._owner.ended_at is not None:
            raise self._owner.gone()
        index = self.index
        index.last += 1
        given = args or {}
        if index.size >= MAX_BYTES:
            given = SPARED
        entry = Begun(index.last, self._clock.now(), op, ident, caller, digest, given)
        index.begun(entry, 0)  # taken; `known` waits until it can be read
        with self._beginning_of(op, ident):
            try:
                offset = await self._append(frame(entry))
            except OSError as exc:
                index.forget(entry.seq)
                raise self._not_written(exc) from exc
        index.begun(entry, offset)
        return entry.seq

    @contextlib.contextmanager
    def _beginning_of(self, op: str, ident: str) -> Iterator[None]:
        """Have those wait who ask for the same; what has no id is never the same."""
        if not ident:
            yield
            return
        done = self._beginning[name_of(op, ident)] = anyio.Event()
        try:
            yield
        finally:
            del self._beginning[name_of(op, ident)]
            done.set()

    async def attempt(
        self,
        op: str,
        *,
        ident: str = "",
        caller: str = "",
        args: dict[str, Any] | None = None,
        digest: bytes = b"",
    ) -> int:
        """As `begin`, but 0 where there is no room for it: what is asked for may be what makes room.

        Raises:
            SandboxGone: it is over.
        """
        if not ident and self.index.size >= FULL_BYTES:
            self._owner.warnings = (NOT_RECORDED,)
            return 0
        try:
            return await self.begin(op, ident=ident, caller=caller, args=args, digest=digest)
        except StorageFull as exc:
            about = {"sandbox_id": self._owner.record.id, "op": op, "error": exc.message}
            logger.warning("not recorded", extra=about)
            return 0

    async def known(self, op: str, ident: str, digest: bytes) -> Known | None:
        """The operation of that id, if there was one. What is said is so when it is said.

        Raises:
            Conflict: it was another operation.
        """
        while True:
            while beginning := self._beginning.get(name_of(op, ident)):
                await beginning.wait()
            if self.index.taken(op, ident):
                message = f"the id {ident} was used for another operation"
                raise Conflict(message, kind="id", id=ident)
            place = self.index.find(op, ident)
            if place is None:
                return None
            begun, ended = await in_thread("disk", entries, self._path, place)
            if self.index.find(op, ident) == place:
                break  # nothing has come to it while it was read
        if begun is not None and begun.digest != digest:
            raise Conflict(f"the id {ident} was used for a different request", kind="id", id=ident)
        return Known(place.seq, begun, ended)

    async def recorded(self, op: str, ident: str) -> tuple[Begun, Ended] | None:
        """The entries of an operation that is over."""
        place = self.index.find(op, ident)
        if place is None or not place.ended_at:
            return None
        begun, ended = await in_thread("disk", entries, self._path, place)
        return (begun, ended) if begun and ended else None

    async def end(  # noqa: PLR0913 - an entry's fields
        self,
        seq: int,
        outcome: str,
        result: dict[str, Any] | None = None,
        *,
        output: tuple[Captured, Captured] | None = None,
        digest: bytes = b"",
        size_bytes: int = 0,
        body: bytes = b"",
    ) -> None:
        """Record how an operation ended; once only, whoever else has heard of it too.

        What cannot be recorded is logged: it has happened all the same, and is told. Of a command it
        is asked for again as soon as there is room.
        """
        if going := self._ending.get(seq):
            await going.wait()
            return
        if not self.index.is_open(seq):
            return
        done = self._ending[seq] = anyio.Event()
        spare = self.index.size >= MAX_BYTES
        stdout, stderr = output if output and not spare else (None, None)
        given = SPARED if spare and (result or output) else result or {}
        body = b"" if spare else body
        entry = Ended(
            seq, self._clock.now(), outcome, given, stdout, stderr, digest, size_bytes, body
        )
        try:
            offset = await self._append(frame(entry))
            self.index.ended(seq, offset, outcome)
        except OSError as exc:
            self._unwritten = True
            logger.warning(
                "an end could not be recorded",
                extra={"sandbox_id": self._owner.record.id, "seq": seq, "error": str(exc)},
            )
        finally:
            del self._ending[seq]
            done.set()

    @property
    def steps(self) -> int:
        """How many entries it has, not counting what is going on at its end."""
        last = self.index.last
        while last and self.index.is_open(last):
            last -= 1
        return last

    @property
    def _path(self) -> Path:
        """Where the file is; at the end of the sandbox it is moved."""
        return self._kept if self._owner.over.is_set() else self._owner.record.path / TRAJECTORY

    async def _append(self, data: bytes) -> int:
        try:
            offset = await self._appender.append(self._path, data)
        except FileNotFoundError:  # it is being moved
            offset = await self._appender.append(self._kept, data)
        self.index.size = offset + len(data)
        if self._unwritten:  # and now there is room
            self._unwritten, self.heard = False, None
        return offset

    def _not_written(self, exc: OSError) -> Exception:
        if isinstance(exc, FileNotFoundError):
            return self._owner.gone()
        if exc.errno in disk.FULL:
            return disk.storage_full(self._kept.parent)
        return StorageFull(f"the operation could not be recorded: {exc.strerror}")


class Recordings:
    """Of a node. Few are in memory: those of sandboxes that are used."""

    def __init__(self, kept: Path, clock: Clock) -> None:
        """Record; `kept` is the directory of those whose sandboxes are over."""
        self.kept = kept
        self._clock = clock
        self._appender = Appender(clock)
        self._known: OrderedDict[str, Recording] = OrderedDict()
        self._alive: WeakValueDictionary[str, Recording] = WeakValueDictionary()
        """Those that somebody is at as well: never are there two of one file."""
        self._loads = Flights()

    async def of(self, owner: Owner) -> Recording:
        """A sandbox's trajectory, read if it is not known."""
        name = owner.record.id
        known = self._alive.get(name)
        if known is None:
            async with self._loads.alone(name):
                known = self._alive.get(name) or await self._load(owner)
        self._known[name] = known
        self._known.move_to_end(name)
        return known

    async def _load(self, owner: Owner) -> Recording:
        name = owner.record.id
        try:
            index = await in_thread("disk", _load, owner.record.path / TRAJECTORY)
        except FileNotFoundError:
            raise owner.gone() from None
        known = Recording(owner, self.kept / name, index, self._appender, self._clock)
        self._known[name] = self._alive[name] = known
        self._make_room()
        return known

    def forget(self, sandbox: str) -> None:
        """It is over."""
        self._known.pop(sandbox, None)
        self._alive.pop(sandbox, None)

    def _make_room(self) -> None:
        total = sum(len(known.index) for known in self._known.values())
        for name, known in [*self._known.items()][:-1]:
            if total <= MAX_IDS:
                return
            if not known.busy:
                total -= len(known.index)
                del self._known[name]


def _load(path: Path) -> Index:
    """Of one that was made before there were trajectories, an empty one. Blocks."""
    if not path.exists() and path.parent.exists():
        writer.create(path)
    return load(path)
