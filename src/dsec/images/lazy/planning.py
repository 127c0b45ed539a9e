"""What to ask the store for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


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


def plan_ranges(
    chunks: Iterable[int], table: Chunks, gap_bytes: int, range_bytes: int
) -> list[Range]:
    """Ranges that hold some chunks, in the order of the pack.

    Args:
        chunks: ascending, each once, none of zeros.
        table: where they lie.
        gap_bytes: a gap between two of them up to this is fetched through.
        range_bytes: a range grows to this at most; a longer chunk has one of its own.
    """
    ranges: list[Range] = []
    for chunk in chunks:
        offset, length = table.stored_span(chunk)
        last = ranges[-1] if ranges else None
        if last is not None and _joins(last, offset, length, gap_bytes, range_bytes):
            end = offset + length
            ranges[-1] = Range(last.offset, end - last.offset, (*last.chunks, chunk))
        else:
            ranges.append(Range(offset, length, (chunk,)))
    return ranges


def _joins(last: Range, offset: int, length: int, gap_bytes: int, range_bytes: int) -> bool:
    gap = offset - (last.offset + last.length)
    return gap <= gap_bytes and offset + length - last.offset <= range_bytes


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
