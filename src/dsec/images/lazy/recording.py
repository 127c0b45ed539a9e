"""What a sandbox reads of its devices, chunk by chunk, the first time each.

Its devices are aliases of the cached ones: same bytes, own names, so that the kernel asks for each
page on this sandbox's account. Notes also go to a file, a moment late and unsynced, so that they
outlive a killed worker; after a reboot nobody has the devices open and they are of no use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
from msgspec import Struct

from dsec.base.clock import Clock
from dsec.images.lazy.reading import FileReader
from dsec.kit.blocking import in_thread
from dsec.wire.filler import ReadSpan, Recording

TOGETHER_MS = 20
"""Reads that follow each other within this are one span."""
SAVE_PAUSE_S = 0.2


class RecordingRecord(Struct, kw_only=True, frozen=True):
    """A recording under way, as it is written down."""

    recording: str
    digests: list[str]
    chunk_bytes: int
    started_at: float


class Recorder:
    """One recording."""

    def __init__(
        self, record: RecordingRecord, chunks: Sequence[int], clock: Clock, file: Path
    ) -> None:
        """Begin with what the file holds already.

        Args:
            record: what is recorded.
            chunks: how many each device has.
            clock: for the time of reads.
            file: where notes are kept; read here, so call it in a thread.
        """
        self.record = record
        self._clock = clock
        self._file = file
        self._began = clock.monotonic() - max(0.0, clock.now() - record.started_at)
        self._seen = [bytearray(count) for count in chunks]
        self._spans: list[ReadSpan] = []
        self._unsaved: list[ReadSpan] = []
        self._noted = anyio.Event()
        for span in _saved(file):
            self._add(span)

    def note(self, device: int, first: int, end: int) -> None:
        """The kernel asks for chunks `first` to `end` (exclusive) of a device."""
        seen = self._seen[device]
        if seen.find(0, first, end) < 0:
            return
        at_ms = int((self._clock.monotonic() - self._began) * 1000)
        while (start := seen.find(0, first, end)) >= 0:
            stop = seen.find(1, start, end)
            span = ReadSpan(at_ms, device, start, (stop if stop >= 0 else end) - start)
            self._add(span)
            self._unsaved.append(span)
        self._noted.set()

    def recording(self) -> Recording:
        """What was read so far."""
        record = self.record
        return Recording(
            recording=record.recording,
            digests=record.digests,
            chunk_bytes=record.chunk_bytes,
            started_at=record.started_at,
            spans=list(self._spans),
        )

    async def save(self) -> None:
        """Write notes to the file as they come, until cancelled."""
        while True:
            await self._noted.wait()
            await anyio.sleep(SAVE_PAUSE_S)
            self._noted = anyio.Event()
            spans, self._unsaved = self._unsaved, []
            with contextlib.suppress(OSError):  # a full disk: the recording lives without
                await in_thread("disk", _append, self._file, spans)

    def _add(self, span: ReadSpan) -> None:
        if span.device >= len(self._seen) or span.count <= 0:
            return
        self._seen[span.device][span.first : span.first + span.count] = b"\1" * span.count
        last = self._spans[-1] if self._spans else None
        if (
            last is not None
            and last.device == span.device
            and last.first + last.count == span.first
            and span.at_ms - last.at_ms <= TOGETHER_MS
        ):
            self._spans[-1] = ReadSpan(last.at_ms, last.device, last.first, last.count + span.count)
        else:
            self._spans.append(span)


class RecordedReader:
    """A `Reader` (interface.py) that notes what is asked of it."""

    def __init__(self, reader: FileReader, recorder: Recorder, device: int) -> None:
        """Read from a device on a recording's account.

        Args:
            reader: of the device.
            recorder: the recording.
            device: its place in the recording.
        """
        self._reader = reader
        self._recorder = recorder
        self._device = device

    @property
    def size_bytes(self) -> int:
        """Length of the device."""
        return self._reader.size_bytes

    @property
    def cache_fd(self) -> int:
        """The cache file."""
        return self._reader.cache_fd

    def read_now(self, offset: int, length: int) -> bytes | None:
        """See `Reader`."""
        data = self._reader.read_now(offset, length)
        if data:
            self._note(offset, length)
        return data

    def is_here(self, offset: int, length: int) -> bool:
        """See `Reader`."""
        here = self._reader.is_here(offset, length)
        if here:
            self._note(offset, length)
        return here

    async def read(self, offset: int, length: int) -> bytes:
        """See `Reader`."""
        self._note(offset, length)
        return await self._reader.read(offset, length)

    async def ensure(self, offset: int, length: int) -> None:
        """See `Reader`."""
        self._note(offset, length)
        await self._reader.ensure(offset, length)

    def _note(self, offset: int, length: int) -> None:
        if 0 <= offset < self.size_bytes and length > 0:
            self._recorder.note(self._device, *self._reader.chunks_of(offset, length))


def _append(file: Path, spans: Sequence[ReadSpan]) -> None:
    with file.open("ab") as out:
        out.write(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))


def _saved(file: Path) -> list[ReadSpan]:
    """What a file holds; a line that was cut off by a kill is left out."""
    spans: list[ReadSpan] = []
    with contextlib.suppress(OSError):
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError):
                spans.append(msgspec.json.decode(line, type=ReadSpan))
    return spans
