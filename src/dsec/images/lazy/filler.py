"""What the filler can be asked for: devices, prefetches, recordings (spec/filler.md)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, DsecError, InvalidRequest, NotFound
from dsec.images.disk import full_disk_named
from dsec.images.lazy.budget import Budget
from dsec.images.lazy.cache import chunk_count, open_cached
from dsec.images.lazy.config import FillerConfig
from dsec.images.lazy.events import Events
from dsec.images.lazy.fetching import Fetching, Pool
from dsec.images.lazy.interface import Front
from dsec.images.lazy.opened import Opened, OpenList, read_list, write_list
from dsec.images.lazy.reading import DataReader, FileReader
from dsec.images.lazy.recording import RecordedReader, Recorder, RecordingRecord
from dsec.images.lazy.shelf import ClosedDevices
from dsec.images.lazy.slots import Slots
from dsec.images.pack import ChunkTable
from dsec.images.records import check_digest
from dsec.images.store.interface import BlobStore
from dsec.kit.blocking import in_thread
from dsec.linux.files import boot_id
from dsec.wire.filler import (
    DataEvent,
    DataOpened,
    DataStatus,
    FillerStatus,
    OpenData,
    Prefetch,
    Recording,
    RecordingStarted,
    StartRecording,
)

logger = logging.getLogger("dsec.filler")


@dataclass(slots=True, eq=False)
class _Device:
    request: OpenData
    """With the path of our own copy of the table."""
    reader: FileReader
    fetching: Fetching | None
    """None for data that is whole in a file of somebody else's."""
    path: str = ""
    """Where it is shown under its own name; empty if it is not."""
    recordings: set[str] = field(default_factory=set)

    @property
    def chunks(self) -> int:
        """How many it has."""
        return chunk_count(self.request.size_bytes, self.request.chunk_bytes)

    async def close(self) -> None:
        """Close its files once nobody is at them."""
        if self.fetching is not None:
            await self.fetching.close()
        else:
            os.close(self.reader.cache_fd)


@dataclass(slots=True, eq=False)
class _Running:
    recorder: Recorder
    scope: anyio.CancelScope
    paths: list[str]


class Filler:
    """The core behind the service. Its methods may be called at once from many tasks."""

    def __init__(self, pool: Pool, budget: Budget, closed: ClosedDevices, front: Front) -> None:
        """Serve nothing yet; use `open_filler`."""
        self._pool = pool
        self._config = pool.config
        self._budget = budget
        self._closed = closed
        self._front = front
        self._events = Events()
        self._devices: dict[str, _Device] = {}
        self._closing: dict[str, anyio.Event] = {}
        self._recordings: dict[str, _Running] = {}
        self._lock = anyio.Lock()
        pool.tell = self._events.tell

    # devices

    async def open(self, request: OpenData) -> DataOpened:
        """Serve a device under its own name; again is harmless.

        Raises:
            InvalidRequest: sizes and table do not fit together.
            StorageFull: no room for its map, or in the run directory.
        """
        while True:
            if (closing := self._closing.get(request.digest)) is not None:
                await closing.wait()
            async with self._lock:
                if request.digest not in self._closing:
                    return await self._open(request)

    async def _open(self, request: OpenData) -> DataOpened:
        device = self._devices.get(request.digest) or await self._bring_up(request)
        if not device.path:
            await self._show(device)
        return DataOpened(path=device.path)

    async def _show(self, device: _Device) -> None:
        try:
            name = _name_of(device.request.digest)
            device.path = str(await self._front.expose(name, device.reader))
            await self._save()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._hide(device)
                await self._finish(await self._let_go([device]))
            raise

    async def _hide(self, device: _Device) -> None:
        await self._front.withdraw(_name_of(device.request.digest))
        device.path = ""

    async def close(self, digest: str) -> None:
        """Serve it under its own name no more; recordings keep theirs. Harmless if it is not."""
        async with self._lock:
            device = self._devices.get(check_digest(digest))
            if device is None or not device.path:
                return
            await self._hide(device)
            closing = await self._let_go([device])
        await self._finish(closing)

    def prefetch(self, request: Prefetch) -> None:
        """Begin to fetch chunks; those that are here or on their way are passed over.

        Raises:
            NotFound: the device is not open.
        """
        if (fetching := self._device(request.digest).fetching) is not None:
            fetching.prefetch(request.spans)

    # recordings

    async def start_recording(self, request: StartRecording) -> RecordingStarted:
        """Show devices under names of their own and write down what is read; again is harmless.

        Raises:
            NotFound: one of them is not open.
            Conflict: the recording runs with other devices.
            InvalidRequest: chunks of the devices differ in size.
            StorageFull: no room in the run directory.
        """
        async with self._lock:
            running = self._recordings.get(request.recording)
            if running is None:
                record = self._record_of(request)
                running = await self._begin(record)
            elif running.recorder.record.digests != request.digests:
                raise Conflict(f"recording {request.recording} runs with other devices")
            return RecordingStarted(paths=running.paths)

    async def _begin(self, record: RecordingRecord) -> _Running:
        running = await self._record(record, self._notes_of(record.recording))
        try:
            await self._save()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._stop(running)
            raise
        return running

    async def _stop(self, running: _Running) -> None:
        record = running.recorder.record
        running.scope.cancel()
        del self._recordings[record.recording]
        await self._withdraw_aliases(record)
        await in_thread("disk", _unlink, self._notes_of(record.recording))

    def recording(self, name: str) -> Recording:
        """What was read so far. Raises NotFound."""
        running = self._recordings.get(name)
        if running is None:
            raise NotFound(f"no recording {name}", kind="recording")
        return running.recorder.recording()

    async def end_recording(self, name: str) -> None:
        """Take its devices away and forget it; harmless if there is none."""
        async with self._lock:
            running = self._recordings.get(name)
            if running is None:
                return
            with anyio.CancelScope(shield=True):
                await self._stop(running)
                digests = running.recorder.record.digests
                closing = await self._let_go([self._devices[each] for each in digests])
        await self._finish(closing)

    # looking

    def status(self) -> FillerStatus:
        """The filler as it stands."""
        self._budget.recount()
        return FillerStatus(
            pid=os.getpid(),
            version=self._config.version,
            front=self._front.name,
            store=self._pool.store.url,
            used_bytes=self._budget.used_bytes,
            budget_bytes=self._config.budget_bytes,
            fetched_bytes=self._pool.fetched_bytes,
            requests=self._pool.requests,
            evicted_bytes=self._budget.evicted_bytes,
            data=[_status_of(device) for device in self._devices.values()],
        )

    async def events(self) -> AsyncGenerator[DataEvent, None]:
        """Devices that begin to fail or work again; first all that fail now."""
        with self._events.listening() as coming:
            for device in list(self._devices.values()):
                if device.fetching is not None and device.fetching.health.failing:
                    yield device.fetching.health.event()
            async for event in coming:
                yield event

    # coming and going

    async def reload(self) -> None:
        """Open what was open when the last worker ended; what cannot be is logged and left out."""
        await self._closed.look()
        found = await in_thread("disk", read_list, self._list_file)
        for opened in found.data:
            await self._try("data", self._reopen, opened)
        for record in found.recordings:
            await self._try("recording", self._record_again, record)
        await in_thread("disk", _clear_notes, self._notes, set(self._recordings))
        unused = [each for each in self._devices.values() if not _in_use(each)]
        await self._finish(await self._let_go(unused))

    async def aclose(self) -> None:
        """Close the files; what is written down as open stays so."""
        for device in self._devices.values():
            await device.close()

    @staticmethod
    async def _try(what: str, act: Callable[..., object], item: object) -> None:
        try:
            await act(item)  # type: ignore[misc]
        except (DsecError, OSError) as exc:
            extra = {"what": what, "item": msgspec.to_builtins(item), "error": str(exc)}
            logger.exception("cannot be opened again", extra=extra)

    async def _reopen(self, opened: Opened) -> None:
        device = await self._bring_up(opened.request)
        if opened.shown:
            name = _name_of(opened.request.digest)
            device.path = str(await self._front.expose(name, device.reader))

    async def _record_again(self, record: RecordingRecord) -> None:
        await self._record(record, self._notes_of(record.recording))

    async def _bring_up(self, request: OpenData) -> _Device:
        made = self._whole(request) if request.raw else self._fetched(request)
        device = self._devices[request.digest] = await made
        return device

    async def _whole(self, request: OpenData) -> _Device:
        fd = await in_thread("disk", _open_whole, Path(request.raw), request.size_bytes)
        return _Device(request, FileReader(fd, request.size_bytes, request.chunk_bytes), None)

    async def _fetched(self, request: OpenData) -> _Device:
        name = _name_of(request.digest)
        directory = Path(self._config.cache) / name
        await self._closed.take(name)
        files = await in_thread("disk", open_cached, directory, request, boot_id())
        try:
            sizes = (request.size_bytes, request.chunk_bytes, request.pack_bytes)
            table = await in_thread("disk", ChunkTable, files.table, *sizes)
        except BaseException:
            files.close()
            raise
        own = msgspec.structs.replace(request, table=str(directory / "table"))
        fetching = Fetching(self._pool, files, table, request.pack)
        self._budget.opened(request.digest, fetching)
        return _Device(own, DataReader(fetching, self._config.longest_read_s), fetching)

    async def _let_go(self, devices: Sequence[_Device]) -> list[_Device]:
        """Forget devices nobody uses any more, and write down what is left; `_finish` them then.

        A full disk keeps nothing open. What it has of the list names more then than there is, which
        the next worker opens and nobody reads; the next change writes it anew.
        """
        gone = [device for device in devices if not _in_use(device)]
        for device in gone:
            del self._devices[device.request.digest]
            self._closing[device.request.digest] = anyio.Event()
            if device.fetching is not None:
                self._budget.closed(device.request.digest)
        with anyio.CancelScope(shield=True):
            try:
                await self._save()
            except (DsecError, OSError) as exc:
                logger.warning("what is open is not written down", extra={"error": str(exc)})
        return gone

    async def _finish(self, devices: Sequence[_Device]) -> None:
        """Close the files once nobody is at them; until then the device cannot be opened again."""
        for device in devices:
            with anyio.CancelScope(shield=True):
                try:
                    await self._put_back(device)
                except OSError as exc:
                    extra = {"digest": device.request.digest, "error": str(exc)}
                    logger.warning("files could not be closed", extra=extra)
                finally:
                    self._closing.pop(device.request.digest).set()

    async def _put_back(self, device: _Device) -> None:
        fetching = device.fetching
        allocated = fetching.files.allocated_bytes if fetching is not None else 0
        await device.close()
        if fetching is not None:
            self._closed.give_back(_name_of(device.request.digest), allocated)

    # recording

    def _record_of(self, request: StartRecording) -> RecordingRecord:
        devices = [self._device(digest) for digest in request.digests]
        sizes = {device.request.chunk_bytes for device in devices}
        if len(sizes) != 1 or len(set(request.digests)) != len(devices):
            raise InvalidRequest("a recording is of devices whose chunks are equal, each once")
        return RecordingRecord(
            recording=request.recording,
            digests=request.digests,
            chunk_bytes=sizes.pop(),
            started_at=self._pool.clock.now(),
        )

    async def _record(self, record: RecordingRecord, notes: Path) -> _Running:
        devices = [self._device(digest) for digest in record.digests]
        chunks = [device.chunks for device in devices]
        recorder = await in_thread("disk", Recorder, record, chunks, self._pool.clock, notes)
        running = _Running(recorder, anyio.CancelScope(), [])
        try:
            for at, device in enumerate(devices):
                device.recordings.add(record.recording)
                name = _name_of(device.request.digest, record.recording)
                alias = RecordedReader(device.reader, recorder, at)
                running.paths.append(str(await self._front.expose(name, alias)))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._withdraw_aliases(record)
            raise
        self._recordings[record.recording] = running
        self._pool.group.start_soon(self._save_notes, running)
        return running

    async def _withdraw_aliases(self, record: RecordingRecord) -> None:
        for digest in record.digests:
            await self._front.withdraw(_name_of(digest, record.recording))
            self._devices[digest].recordings.discard(record.recording)

    @staticmethod
    async def _save_notes(running: _Running) -> None:
        with running.scope:
            await running.recorder.save()

    def _device(self, digest: str) -> _Device:
        device = self._devices.get(digest)
        if device is None:
            raise NotFound(f"data {digest} is not open", kind="data")
        return device

    # on the disk

    @property
    def _list_file(self) -> Path:
        return self._config.home / "open.json"

    @property
    def _notes(self) -> Path:
        return self._config.home / "recordings"

    def _notes_of(self, recording: str) -> Path:
        return self._notes / recording

    async def _save(self) -> None:
        opened = OpenList(
            boot_id=boot_id(),
            data=[Opened(request=d.request, shown=bool(d.path)) for d in self._devices.values()],
            recordings=[each.recorder.record for each in self._recordings.values()],
        )
        with full_disk_named(self._list_file):
            await in_thread("disk", write_list, self._list_file, opened)


@asynccontextmanager
async def open_filler(
    config: FillerConfig, store: BlobStore, front: Front, clock: Clock
) -> AsyncIterator[Filler]:
    """A filler with what was open before, not yet serving the kernel.

    Args:
        config: the settings.
        store: where data comes from; stays the caller's.
        front: where devices are shown.
        clock: for all times.
    """
    closed = ClosedDevices(Path(config.cache))
    budget = Budget(config.budget_bytes, closed, evictable=front.name != "fanotify")
    async with anyio.create_task_group() as group:
        slots = Slots(config.parallel)
        pool = Pool(config, store, clock, group, budget, slots, lambda _event: None)
        filler = Filler(pool, budget, closed, front)
        try:
            await filler.reload()
            yield filler
        finally:
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await filler.aclose()


def _name_of(digest: str, recording: str = "") -> str:
    """A device's name: the digest's hex digits, and whose it is."""
    hexdigest = digest.removeprefix("sha256:")
    return f"{hexdigest}.{recording}" if recording else hexdigest


def _in_use(device: _Device) -> bool:
    return bool(device.path or device.recordings)


def _open_whole(path: Path, size_bytes: int) -> int:
    """Open data that is whole in a file.

    Raises:
        NotFound: there is no such file. InvalidRequest: its size is another.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise NotFound(f"the data's file {path} cannot be opened: {exc}", kind="data") from exc
    if os.fstat(fd).st_size != size_bytes:
        os.close(fd)
        raise InvalidRequest(f"{path} has not the {size_bytes} bytes of the device")
    return fd


def _status_of(device: _Device) -> DataStatus:
    request, fetching = device.request, device.fetching
    status = DataStatus(
        digest=request.digest,
        size_bytes=request.size_bytes,
        present_bytes=request.size_bytes,
        fetched_bytes=0,
    )
    if fetching is not None:
        health = fetching.health
        status.present_bytes = fetching.files.present_bytes
        status.fetched_bytes = fetching.fetched_bytes
        status.failing, status.errors = health.failing, health.errors
        status.last_error, status.last_error_at = health.last_error, health.last_error_at
    return status


def _unlink(file: Path) -> None:
    with contextlib.suppress(OSError):  # what stays is cleared when a worker starts
        file.unlink(missing_ok=True)


def _clear_notes(directory: Path, known: set[str]) -> None:
    """Remove what recordings of an earlier time left."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in directory.iterdir():
        if file.name not in known:
            file.unlink()
