"""What a run read of an environment, from a recording of chunks: by part, over time, by file. Pure."""

from __future__ import annotations

import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from dsec.images.erofs.tree import BLOCK, HOLE, Inode
from dsec.images.overlaid import Entry, Part, overlay
from dsec.images.paths import shown
from dsec.wire.filler import ReadSpan, Recording
from dsec.wire.public_v1 import EnvironmentRef, TraceFile, TracePart, TraceRead, TraceView

MAX_FILES = 200
MAX_READS = 100_000
"""The first ones are shown; sums are of all."""


def trace_view(
    environment: EnvironmentRef,
    trace: str,
    recorded_at: float,
    parts: Sequence[Part],
    recording: Recording,
) -> TraceView:
    """Say what a recording means.

    Chunks are what was read; a file that shares a chunk with one that was asked for counts as read
    there. Devices that the environment no longer has are left out.

    Args:
        environment: what was recorded, as asked for.
        trace: the trace's name.
        recorded_at: seconds since the epoch.
        parts: the environment's, bottom first. A device of several parts counts for the lowest.
        recording: as the filler has it.
    """
    devices = _devices(parts)
    index = {part.digest: number for number, part in enumerate(devices)}
    reads = list(_reads(recording, devices, index))
    ranges = [Ranges(r for r in reads if r.part == n) for n in range(len(devices))]
    for part, read in zip(devices, ranges, strict=True):
        part.read_bytes = read.total
    return TraceView(
        environment=environment,
        trace=trace,
        recorded_at=recorded_at,
        parts=devices,
        reads=reads[:MAX_READS],
        files=_files(parts, index, ranges),
        total_bytes=sum(part.size_bytes for part in devices),
        read_bytes=sum(part.read_bytes for part in devices),
    )


def _devices(parts: Sequence[Part]) -> list[TracePart]:
    found: dict[str, TracePart] = {}
    for part in parts:
        for device in part.tree.devices:
            one = TracePart(layer=part.label, digest=device.digest, size_bytes=device.size_bytes)
            found.setdefault(device.digest, one)
    return list(found.values())


def _reads(
    recording: Recording, devices: list[TracePart], index: dict[str, int]
) -> Iterator[TraceRead]:
    for span in sorted(recording.spans, key=lambda span: span.at_ms):
        if not 0 <= span.device < len(recording.digests):
            continue
        part = index.get(recording.digests[span.device])
        if part is None:
            continue
        offset, length = _bytes(span, recording.chunk_bytes, devices[part].size_bytes)
        if length > 0:
            yield TraceRead(span.at_ms, part, offset, length)


def _bytes(span: ReadSpan, chunk_bytes: int, size: int) -> tuple[int, int]:
    """Offset and length of a span, cut at the device's end."""
    offset = span.first * chunk_bytes
    return offset, min(span.count * chunk_bytes, size - offset)


class Ranges:
    """Bytes of a device that were read, in order, none twice."""

    def __init__(self, reads: Iterable[TraceRead]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted((r.offset, r.offset + r.length) for r in reads):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
        lengths = (e - s for s, e in zip(self._starts, self._ends, strict=True))
        self._before = [0, *accumulate(lengths)]

    @property
    def total(self) -> int:
        """All of them."""
        return self._before[-1]

    def within(self, start: int, end: int) -> int:
        """How many of them lie from `start` up to `end`."""
        return self._up_to(end) - self._up_to(start)

    def _up_to(self, offset: int) -> int:
        after = bisect_left(self._starts, offset)
        if after == 0:
            return 0
        return self._before[after] - max(0, self._ends[after - 1] - offset)


def _files(parts: Sequence[Part], index: dict[str, int], ranges: list[Ranges]) -> list[TraceFile]:
    """The files read, the most read first; a hard link under the first of its names."""
    files: dict[int, Entry] = {}
    for entry in overlay(parts).entries.values():
        if stat.S_ISREG(entry.inode.mode):
            files.setdefault(id(entry.inode), entry)
    found = [_file(parts, entry, index, ranges) for entry in files.values()]
    read = [file for file in found if file.read_bytes]
    return sorted(read, key=lambda file: (-file.read_bytes, file.path))[:MAX_FILES]


def _file(
    parts: Sequence[Part], entry: Entry, index: dict[str, int], ranges: list[Ranges]
) -> TraceFile:
    part = parts[entry.part]
    digests = [device.digest for device in part.tree.devices]
    read = sum(
        ranges[index[digests[device]]].within(start, end)
        for device, start, end in _pieces(entry.inode)
    )
    return TraceFile(
        path=shown(entry.path), layer=part.label, size_bytes=entry.inode.size, read_bytes=read
    )


def _pieces(inode: Inode) -> Iterator[tuple[int, int, int]]:
    """Where a file's bytes are: device, first byte, byte after the last. Holes are nowhere."""
    left = inode.size
    for extent in inode.extents:
        length = min(extent.blocks * BLOCK, left)
        if extent.device != HOLE and length > 0:
            start = extent.block * BLOCK
            yield extent.device, start, start + length
        left -= length
