"""What is asked for, in which order, and in whose turn."""

from __future__ import annotations

from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from dsec.images.lazy.groups import Groups
from dsec.images.lazy.planning import (
    MOST_CHUNKS,
    SLICE,
    first_wanted_first,
    plan_ranges,
    runs,
    wanted_once,
    window,
)
from dsec.images.lazy.slots import Slots, Turn


class Table:
    """Stored sizes alone."""

    def __init__(self, sizes: list[int]) -> None:
        self.count = len(sizes)
        self._sizes = sizes

    def stored_span(self, chunk: int) -> tuple[int, int]:
        return sum(self._sizes[:chunk]), self._sizes[chunk]

    def unpack_chunk(self, _chunk: int, _stored: bytes | memoryview, /) -> bytes:
        raise AssertionError


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    wanted=st.sets(st.integers(0, 39)),
    gap=st.integers(0, 60),
    limit=st.integers(1, 200),
)
def test_ranges_hold_what_is_wanted(
    sizes: list[int], wanted: set[int], gap: int, limit: int
) -> None:
    table = Table(sizes)
    chunks = sorted(each for each in wanted if each < len(sizes) and sizes[each])
    ranges = plan_ranges(chunks, table, gap, limit)
    assert [chunk for each in ranges for chunk in each.chunks] == chunks
    for each in ranges:
        first, last = table.stored_span(each.chunks[0]), table.stored_span(each.chunks[-1])
        assert (each.offset, each.length) == (first[0], last[0] + last[1] - first[0])
        assert each.length <= limit or len(each.chunks) == 1
        ends = [sum(table.stored_span(chunk)) for chunk in each.chunks]
        starts = [table.stored_span(chunk)[0] for chunk in each.chunks[1:]]
        assert all(start - end <= gap for start, end in zip(starts, ends, strict=False))
    for one, two in pairwise(ranges):
        distance = two.offset - one.offset - one.length
        both = two.offset + table.stored_span(two.chunks[0])[1] - one.offset
        assert distance > gap or both > limit, "two requests where one would do"


def test_order_of_ranges() -> None:
    ranges = plan_ranges([0, 1, 5, 9], Table([10] * 10), 0, 100)
    ordered = first_wanted_first(ranges, [9, 1, 5, 0])
    assert [each.chunks for each in ordered] == [(9,), (0, 1), (5,)]


def test_a_range_is_bounded_however_well_its_chunks_compress() -> None:
    count = 3 * MOST_CHUNKS + 1
    ranges = plan_ranges(range(count), Tiny(count), 0, 1 << 20)
    assert [len(each.chunks) for each in ranges] == [MOST_CHUNKS] * 3 + [1]
    assert sum(each.length for each in ranges) == count


class Tiny(Table):
    """One byte each."""

    def __init__(self, count: int) -> None:
        super().__init__([1] * count)

    @override
    def stored_span(self, chunk: int) -> tuple[int, int]:
        return chunk, 1


@given(
    spans=st.lists(st.tuples(st.integers(-9, 40), st.integers(-3, 40)), max_size=30),
    count=st.integers(1, 30),
)
def test_what_is_wanted_is_said_once_and_in_order(spans: list[tuple[int, int]], count: int) -> None:
    wanted = [chunk for part in wanted_once(spans, count) for chunk in part]
    plainly = (c for first, n in spans[:count] for c in range(max(0, first), first + n))
    assert wanted == list(dict.fromkeys(chunk for chunk in plainly if chunk < count))


def test_a_trace_of_the_whole_device_over_and_over_is_a_few_slices() -> None:
    count = 10_000
    parts = list(wanted_once([(0, 1 << 60)] * 1_000_000, count))
    assert [chunk for part in parts for chunk in part] == list(range(count))
    assert len(parts) <= 2 * count // SLICE + 1
    assert max(map(len, parts)) <= SLICE


def test_windows_are_aligned_and_end_with_the_device() -> None:
    assert window(5, 6, 4, 100) == (4, 8)
    assert window(3, 9, 4, 100) == (0, 12)
    assert window(97, 98, 4, 99) == (96, 99)


def test_runs() -> None:
    assert runs([]) == []
    assert runs([1, 2, 3, 7, 9, 10]) == [(1, 4), (7, 8), (9, 11)]


def test_the_hand_takes_what_was_read_once_before_what_is_read_again() -> None:
    groups = Groups(chunks=12, per_group=4)
    groups.filled(0, 12)
    groups.used(4, 8)
    assert groups.pass_hand(0) is None
    assert groups.pass_hand(0) == 0
    with groups.pin(0, 1):
        assert groups.pass_hand(0) == 2
    with groups.leaving([0, 2]):
        pass
    assert groups.pass_hand(0) is None
    assert groups.pass_hand(0) == 1


pytestmark = pytest.mark.anyio


async def test_slots_are_granted_in_order_and_given_back() -> None:
    slots, order = Slots(1), list[str]()

    async def work(name: str, turn: Turn) -> None:
        async with slots.turn(turn):
            order.append(name)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        holder = Turn("x", urgent=True)
        async with slots.turn(holder):
            turns = {
                "prefetch": Turn("a", urgent=False),
                "first": Turn("a", urgent=True),
                "second": Turn("a", urgent=True),
                "other": Turn("b", urgent=True),
                "promoted": Turn("c", urgent=False),
            }
            for turn in turns.values():
                slots.line_up(turn)
            slots.promote(turns["promoted"])
            left = Turn("d", urgent=True)
            slots.line_up(left)
            slots.leave(left)
            for name, turn in turns.items():
                group.start_soon(work, name, turn)
            await anyio.wait_all_tasks_blocked()
            assert order == []
    assert order == ["first", "other", "promoted", "second", "prefetch"]


async def test_a_quarter_is_kept_for_those_who_wait() -> None:
    slots = Slots(4)
    patient = [Turn("a", urgent=False) for _ in range(5)]
    for turn in patient:
        slots.line_up(turn)
    assert sum(turn.granted.is_set() for turn in patient) == 3
    urgent = Turn("b", urgent=True)
    slots.line_up(urgent)
    assert urgent.granted.is_set()


async def test_who_is_cancelled_in_the_line_leaves_no_hole() -> None:
    slots = Slots(1)
    held, waits, last = (Turn("a", urgent=True) for _ in range(3))

    async def wait() -> None:
        async with slots.turn(waits):
            raise AssertionError

    async with slots.turn(held), anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    with anyio.fail_after(10):
        async with slots.turn(last):
            pass
