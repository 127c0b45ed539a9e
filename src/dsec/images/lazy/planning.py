"""What to ask the store for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

SLICE = 512
"""Steps of a prefetch between two turns of others on the loop: a few milliseconds."""
MOST_CHUNKS = 256
"""Of one range."""


class Chunks(Protocol):
    """A device's table of chunks, as `dsec.images.pack.ChunkTable` is one."""

    @property
    def count(self) -> int:
        """Chunks of the device."""
        ...

    def stored_span(self, chunk: int, /) -> tuple[int, int]:
        """Offset in the pack and stored length; length 0 = the chunk is all zeros."""
        ...

    def unpack_chunk(self, chunk: int, stored: bytes | memoryview, /) -> bytes:
        """Verify what the store gave and decompress it.

        Raises:
            DataUnavailable: it does not match its digest.
        """
        ...


@dataclass(frozen=True, slots=True)
class Range:
    """One request: some bytes of the pack, and the chunks wanted out of them, ascending."""

    offset: int
    length: int
    chunks: tuple[int, ...]


def wanted_once(spans: Iterable[tuple[int, int]], count: int) -> Iterator[list[int]]:
    """The chunks of spans, each once and in this order, in slices for a caller that has others to serve.

    A slice, which may be empty, takes `SLICE` steps: a span looked at is one, and so is a chunk found.
    There are no more of both than spans and chunks, however the spans overlap.

    Args:
        spans: first chunk and count, from anyone. Of more than the device has chunks the rest is left
            out: a recording names each chunk once.
        count: chunks of the device; what lies outside is passed over.
    """
    steps = _steps(spans, count)
    while batch := list(islice(steps, SLICE)):
        yield [chunk for chunk in batch if chunk is not None]


def _steps(spans: Iterable[tuple[int, int]], count: int) -> Iterator[int | None]:
    """A chunk that was found, or None for a span that is done."""
    onward: dict[int, int] = {}
    for first, length in islice(spans, count):
        chunk, end = _next_fresh(onward, max(0, first)), min(first + length, count)
        while chunk < end:
            yield chunk
            onward[chunk] = chunk + 1
            chunk = _next_fresh(onward, chunk + 1)
        yield None


def _next_fresh(onward: dict[int, int], chunk: int) -> int:
    """The first chunk from here on that was not found yet; makes the way there short."""
    fresh = chunk
    while (further := onward.get(fresh)) is not None:
        fresh = further
    while chunk != fresh:
        onward[chunk], chunk = fresh, onward[chunk]
    return fresh


def plan_ranges(
    chunks: Iterable[int], table: Chunks, gap_bytes: int, range_bytes: int
) -> list[Range]:
    """Ranges that hold some chunks, in the order of the pack.

    Args:
        chunks: ascending, each once, none of zeros.
        table: where they lie.
        gap_bytes: a gap between two of them up to this is fetched through.
        range_bytes: a range grows to this at most; a longer chunk has one of its own. It has no more
            than `MOST_CHUNKS` either: all of a range is in memory at once, uncompressed.
    """
    ranges: list[Range] = []
    start = end = 0
    joined: list[int] = []
    for chunk in chunks:
        offset, length = table.stored_span(chunk)
        fits = offset - end <= gap_bytes and offset + length - start <= range_bytes
        if joined and not (fits and len(joined) < MOST_CHUNKS):
            ranges.append(Range(start, end - start, tuple(joined)))
            joined = []
        if not joined:
            start = offset
        joined.append(chunk)
        end = offset + length
    if joined:
        ranges.append(Range(start, end - start, tuple(joined)))
    return ranges


def first_wanted_first(ranges: list[Range], wanted: Sequence[int]) -> list[Range]:
    """The ranges in the order in which the first chunk of each is wanted."""
    place: dict[int, int] = {}
    for at, chunk in enumerate(wanted):
        place.setdefault(chunk, at)
    return sorted(ranges, key=lambda each: min(place[chunk] for chunk in each.chunks))


def window(first: int, end: int, per_group: int, count: int) -> tuple[int, int]:
    """Whole groups around `first` to `end` (exclusive), cut at the device's end."""
    return first // per_group * per_group, min(-(-end // per_group) * per_group, count)


def runs(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs of first and end (exclusive)."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and found[-1][1] == chunk:
            found[-1] = (found[-1][0], chunk + 1)
        else:
            found.append((chunk, chunk + 1))
    return found
