"""Chunks from the store into the cache: each fetched once however many wait for it.

A flight is one range on its way. It runs in the filler's own tasks, so a reader that leaves takes
nobody's data with it, and it ends whatever happens: each of its chunks is here, in the flight's
hands (the cache was full), or has an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import anyio.abc
from anyio.lowlevel import checkpoint

from dsec.base.clock import Clock
from dsec.base.errors import DataUnavailable, DsecError, NotFound, PermissionDenied, StorageFull
from dsec.images.lazy.cache import CachedData
from dsec.images.lazy.config import FillerConfig
from dsec.images.lazy.filling import Outcome, fill, unpack
from dsec.images.lazy.groups import Groups
from dsec.images.lazy.health import Health
from dsec.images.lazy.planning import (
    Chunks,
    Range,
    first_wanted_first,
    plan_ranges,
    runs,
    wanted_once,
    window,
)
from dsec.images.lazy.slots import Slots, Turn
from dsec.images.store.interface import BlobStore
from dsec.kit.blocking import in_thread
from dsec.wire.filler import DataEvent

logger = logging.getLogger("dsec.filler")

_BUDGET_FULL = "the node's cache is full of data that sandboxes have open: raise cache_mb"
_DISK_FULL = "the disk of the node's cache is full: make room on it"


class Room(Protocol):
    """Who says whether there is room in the cache (`budget.py`)."""

    async def make_room(self, need_bytes: int) -> bool:
        """Reserve room for some bytes, evicting others; False = they cannot be kept."""
        ...

    def took(self, reserved_bytes: int, written_bytes: int) -> None:
        """What was reserved has been used, or not."""
        ...

    async def relieve(self, need_bytes: int) -> bool:
        """Make room on a full disk; False = nothing could go."""
        ...


@dataclass(slots=True)
class Pool:
    """What the devices of a filler share."""

    config: FillerConfig
    store: BlobStore
    clock: Clock
    group: anyio.abc.TaskGroup
    room: Room
    slots: Slots
    tell: Callable[[DataEvent], None]
    requests: int = 0
    fetched_bytes: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """One range on its way."""

    range: Range
    turn: Turn
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    failed: dict[int, DataUnavailable] = field(default_factory=dict)
    loose: dict[int, bytes] = field(default_factory=dict)
    """Chunks that could not be kept, for those who wait now."""


class Fetching:
    """The flights of one device."""

    def __init__(self, pool: Pool, files: CachedData, table: Chunks, pack: str) -> None:
        """Fetch into some files.

        Args:
            pool: what is shared with other devices.
            files: where chunks go.
            table: which chunks there are.
            pack: digest of the blob they lie in.
        """
        config = pool.config
        self.digest = files.state.digest
        self.files = files
        self.table = table
        self.groups = Groups(table.count, max(1, config.window_bytes // files.state.chunk_bytes))
        first_window = min(config.first_window_bytes, config.window_bytes)
        self._first_window = max(1, first_window // files.state.chunk_bytes)
        self.health = Health(self.digest, pool.clock, config.retry_after_s, self._tell)
        self.fetched_bytes = 0
        self._pool = pool
        self._pack = pack
        self._flights: dict[int, Flight] = {}
        self._probing = False
        self._sealing = False
        self._closed = False
        self._why_loose = _DISK_FULL
        self._needed_bytes = 0
        for group in range(self.groups.count):
            first, end = self.groups.span(group)
            if files.map.present(first, end):
                self.groups.filled(first, end)

    # asking

    async def have(self, first: int, end: int) -> dict[int, bytes]:
        """Wait until chunks are here, fetching what is missing and its surroundings.

        The caller has pinned them. Returns those that could not be kept in the cache.

        Raises:
            DataUnavailable: one of them cannot be had.
        """
        loose: dict[int, bytes] = {}
        for flight in self._board(first, end):
            await flight.done.wait()
            for chunk in flight.range.chunks:
                if first <= chunk < end and chunk in flight.failed:
                    error = flight.failed[chunk]
                    raise DataUnavailable(error.message, **error.details)
            loose |= flight.loose
        return loose

    def prefetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Begin to fetch chunks nobody waits for, about in this order; a device that fails is left alone.

        Args:
            spans: first chunk and count; what is not in the device is passed over.
        """
        self._pool.group.start_soon(self._prefetch, spans)

    async def _prefetch(self, spans: Iterable[tuple[int, int]]) -> None:
        for chunks in wanted_once(spans, self.table.count):
            if self.health.broken or self._closed:
                return
            if wanted := [c for c in chunks if self._is_absent(c) and c not in self.health.bad]:
                self._launch(wanted, urgent=False)
            await checkpoint()

    def _is_absent(self, chunk: int) -> bool:
        """Neither here nor on its way."""
        return chunk not in self._flights and not self.files.map.covers(chunk, chunk + 1)

    def no_room(self) -> StorageFull:
        """The error for data that came, could not be kept, and is of use in the cache only."""
        error = StorageFull(self._why_loose, digest=self.digest)
        self.health.no_room(error)
        return error

    async def close(self) -> None:
        """Give up what is on its way, wait for those who hold something, and close the files."""
        self._closed = True
        for flight in set(self._flights.values()):
            flight.scope.cancel()
        await self.groups.wait_unpinned()
        self.health.closed()
        await in_thread("disk", self.files.close)

    def _board(self, first: int, end: int) -> list[Flight]:
        """The flights that bring what is missing; new ones if need be."""
        missing = self.files.map.missing(first, end)
        fresh = [chunk for chunk in missing if chunk not in self._flights]
        if fresh:
            self._refuse_if_closed()
            self.health.admit(fresh)
            self._launch(self._around(fresh), urgent=True)
        flights = dict.fromkeys(self._flights[c] for c in missing if c in self._flights)
        for flight in flights:
            self._pool.slots.promote(flight.turn)
        return list(flights)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise DataUnavailable("the device is closed", digest=self.digest)

    def _around(self, fresh: Sequence[int]) -> list[int]:
        low, high = window(fresh[0], fresh[-1] + 1, self.groups.per_group, self.table.count)
        if self.health.broken:  # one attempt, as small as can be
            low, high = fresh[0], fresh[-1] + 1
        elif not self._wanted_near(low, high):
            low, high = window(fresh[0], fresh[-1] + 1, self._first_window, self.table.count)
        bad = self.health.bad.keys() - fresh
        missing = self.files.map.missing(low, high)
        return [c for c in missing if c not in self._flights and c not in bad]

    def _wanted_near(self, low: int, high: int) -> bool:
        """Whether anything of a window, or what lies right before it, was wanted already."""
        low = max(0, low - 1)
        return bool(self.files.map.present(low, high)) or any(
            chunk in self._flights for chunk in range(low, high)
        )

    def _launch(self, wanted: list[int], *, urgent: bool) -> None:
        stored = [chunk for chunk in wanted if self.table.stored_span(chunk)[1]]
        zeros = set(wanted).difference(stored)
        for first, end in runs(sorted(zeros)):
            self.files.map.mark(first, end)  # the hole in the file reads as zeros already
            self.groups.filled(first, end)
        config = self._pool.config
        limit = 2 * config.window_bytes if urgent else config.range_bytes
        ranges = plan_ranges(sorted(stored), self.table, config.gap_bytes, limit)
        for each in first_wanted_first(ranges, stored):
            flight = Flight(each, Turn(self.digest, urgent))
            self._flights.update(dict.fromkeys(each.chunks, flight))
            self._pool.slots.line_up(flight.turn)
            self._pool.group.start_soon(self._fly, flight)

    # flying

    async def _fly(self, flight: Flight) -> None:
        chunks = flight.range.chunks
        first, end = chunks[0], chunks[-1] + 1
        with self.groups.pin(first, end):
            try:
                with flight.scope:
                    await self._bring(flight)
            except Exception as exc:
                logger.exception("unforeseen failure of a fetch", extra={"digest": self.digest})
                self._give_up(flight, chunks, DataUnavailable(f"internal error: {exc!r}"))
            finally:
                self._pool.slots.leave(flight.turn)
                self._land(flight)
            await self._seal_if_complete()

    def _land(self, flight: Flight) -> None:
        for chunk in flight.range.chunks:
            del self._flights[chunk]
            if not (chunk in flight.loose or self.files.map.covers(chunk, chunk + 1)):
                gone = DataUnavailable("the fetch was given up", digest=self.digest)
                flight.failed.setdefault(chunk, gone)
        flight.done.set()

    async def _bring(self, flight: Flight) -> None:
        """Fetch, verify and keep; what came wrong is fetched once more."""
        bad = await self._bring_once(flight, flight.range)
        for first, end in runs(sorted(bad)):
            again = self._range_of(first, end)
            for chunk, error in (await self._bring_once(flight, again)).items():
                flight.failed[chunk] = error
                self.health.came_wrong(chunk, error)

    def _range_of(self, first: int, end: int) -> Range:
        offset, _ = self.table.stored_span(first)
        last, length = self.table.stored_span(end - 1)
        return Range(offset, last + length - offset, tuple(range(first, end)))

    async def _bring_once(self, flight: Flight, part: Range) -> dict[int, DataUnavailable]:
        """Returns the chunks that came wrong."""
        config, failures = self._pool.config, 0
        while True:
            try:
                async with self._pool.slots.turn(flight.turn):
                    return await self._keep(flight, part, await self._ask(part))
            except DataUnavailable as error:
                failures += 1
                final = bool(error.details.get("final")) or self.health.broken
                if final or failures >= config.attempts:
                    self._give_up(flight, part.chunks, error)
                    return {}
            await anyio.sleep(config.pause_s * 2 ** (failures - 1))

    async def _ask(self, part: Range) -> bytes:
        """One request. Raises DataUnavailable."""
        pool, timeout_s = self._pool, self._pool.config.attempt_timeout_s
        pool.requests += 1
        try:
            with anyio.fail_after(timeout_s):
                body = await pool.store.read_blob(self._pack, part.offset, part.length)
        except TimeoutError:
            raise self._unavailable(f"no answer within {timeout_s:g} s") from None
        except (NotFound, PermissionDenied) as exc:
            raise self._unavailable(exc.message, final=True) from exc
        except (DsecError, OSError) as exc:
            raise self._unavailable(str(exc)) from exc
        pool.fetched_bytes += len(body)
        self.fetched_bytes += len(body)
        if len(body) != part.length:
            raise self._unavailable(f"{len(body)} bytes instead of {part.length}")
        return body

    def _unavailable(self, why: str, *, final: bool = False) -> DataUnavailable:
        what = f"the store {self._pool.store.url} does not give data of {self.digest}: {why}"
        return DataUnavailable(what, digest=self.digest, final=final or None)

    def _give_up(self, flight: Flight, chunks: Sequence[int], error: DataUnavailable) -> None:
        for chunk in chunks:
            flight.failed[chunk] = error
        logger.warning("fetch failed", extra={"digest": self.digest, "error": error.message})
        self.health.failed(chunks[0], error)

    # keeping

    async def _keep(self, flight: Flight, part: Range, body: bytes) -> dict[int, DataUnavailable]:
        """Verify, write, mark. Returns the chunks that came wrong."""
        size = len(part.chunks) * self.files.state.chunk_bytes
        self._needed_bytes = size
        if await self._pool.room.make_room(size):
            outcome = await self._fill(part, body, size)
            if outcome.loose and await self._pool.room.relieve(size):
                outcome = await self._fill(part, body, 0)
            self._why_loose = _DISK_FULL
        else:
            outcome = await in_thread("fill", unpack, self.table, part, body)
            self._why_loose = _BUDGET_FULL
        flight.loose |= outcome.loose
        for chunk, error in outcome.bad.items():
            what = f"data of {self.digest} does not match its digest: {error.message}"
            outcome.bad[chunk] = DataUnavailable(what, digest=self.digest)
        right = [c for c in part.chunks if c not in outcome.bad]
        self._filled(right)
        self.health.worked(right)
        return outcome.bad

    async def _fill(self, part: Range, body: bytes, reserved_bytes: int) -> Outcome:
        written = 0
        try:
            await self.groups.wait_left(part.chunks[0], part.chunks[-1] + 1)
            outcome = await in_thread("fill", fill, self.files, self.table, part, body)
            written = outcome.written_bytes
            return outcome
        finally:
            self._pool.room.took(reserved_bytes, written)

    def _filled(self, chunks: Sequence[int]) -> None:
        for first, end in runs(chunks):
            if self.files.map.present(first, end):
                self.groups.filled(first, end)

    async def _seal_if_complete(self) -> None:
        """Once every chunk is here, they outlive the boot."""
        files = self.files
        whole = files.map.covers(0, files.map.count)
        if not whole or files.state.complete or self._sealing or self._closed:
            return
        self._sealing = True
        try:
            with self.groups.pin(0, files.map.count):  # nothing may be punched meanwhile
                await in_thread("disk", files.seal)
        except OSError as exc:
            logger.warning("cannot seal", extra={"digest": self.digest, "error": str(exc)})
        finally:
            self._sealing = False

    # recovering

    def _tell(self, event: DataEvent) -> None:
        self._pool.tell(event)
        log = logger.warning if event.failing else logger.info
        log("data fails" if event.failing else "data works again", extra={"digest": self.digest})
        if event.failing and not self._probing:
            self._probing = True
            self._pool.group.start_soon(self._probe)

    async def _probe(self) -> None:
        """Ask now and then for what failed, until it can be had.

        Somebody may wait for the event and read nothing meanwhile.
        """
        try:
            while self.health.failing and not self._closed:
                await anyio.sleep(self._pool.config.probe_every_s)
                await self._probe_until_failure()
                await self._probe_room()
        finally:
            self._probing = False

    async def _probe_room(self) -> None:
        """See whether what could not be kept could be now."""
        if self.health.full and await self._pool.room.make_room(self._needed_bytes):
            self._pool.room.took(self._needed_bytes, 0)
            self.health.room()

    async def _probe_until_failure(self) -> None:
        while (chunk := self.health.suspect) is not None and not self._closed:
            flight = self._flights.get(chunk)
            if flight is None and self.files.map.covers(chunk, chunk + 1):
                self.health.worked((chunk,))
                continue
            if flight is None:
                self._launch([chunk], urgent=True)
                flight = self._flights[chunk]
            await flight.done.wait()
            if chunk in flight.failed:
                return
            self.health.worked((chunk,))
