"""Single flight, windows, verification, what is never served."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from dsec.base.errors import DataUnavailable, NotFound, StorageFull, Unavailable
from dsec.images.lazy.planning import SLICE
from dsec.wire.filler import DataEvent, Prefetch
from tests.unit.images.lazy.bench import (
    CHUNK,
    Bench,
    Sample,
    chunk_of,
    read_chunk,
    sample,
    until,
)

pytestmark = pytest.mark.anyio


async def test_every_byte_is_right_at_any_offset(tmp_path: Path) -> None:
    device = Sample(sample(10, zeros=(3, 4)).content + b"tail" * 1024)
    bench = Bench(tmp_path, device)
    async with bench.running():
        reader = bench.reader()
        for offset, length in [(0, 1), (CHUNK - 1, 2), (5000, 30000), (40000, 99999), (1 << 20, 5)]:
            assert await reader.read(offset, length) == device.content[offset : offset + length]
        assert await reader.read(0, len(device.content)) == device.content
        assert reader.read_now(100, 9000) in (None, device.content[100:9100])


async def test_two_readers_of_a_chunk_are_one_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    bench.store.gate = anyio.Event()
    async with bench.running(), anyio.create_task_group() as readers:

        async def read() -> None:
            assert await bench.reader().read(0, CHUNK) == chunk_of(device, 0)

        for _ in range(5):
            readers.start_soon(read)
        await until(lambda: bool(bench.store.requests))
        bench.store.gate.set()
    assert len(bench.store.requests) == 1


async def test_a_reader_that_leaves_takes_nobodys_data_with_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    bench.store.gate = anyio.Event()
    async with bench.running(), anyio.create_task_group() as readers:
        left = anyio.CancelScope()

        async def leave() -> None:
            with left:
                await bench.reader().read(0, CHUNK)

        async def stay() -> None:
            assert await bench.reader().read(0, CHUNK) == chunk_of(device, 0)

        readers.start_soon(leave)
        await until(lambda: bool(bench.store.requests))
        readers.start_soon(stay)
        left.cancel()
        await anyio.wait_all_tasks_blocked()
        bench.store.gate.set()
    assert len(bench.store.requests) == 1


async def test_a_miss_fetches_its_window_in_one_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(12))
    async with bench.running():
        assert await bench.reader().read(5 * CHUNK, CHUNK) == chunk_of(device, 5)
        start, length = device.spans[4][0], sum(size for _, size in device.spans[4:8])
        assert bench.store.requests == [(start, length)]
        assert await bench.reader().read(4 * CHUNK, 4 * CHUNK) == chunk_of(device, 4, 4)
        assert len(bench.store.requests) == 1
        await bench.reader().read(0, 12 * CHUNK)
        assert len(bench.store.requests) == 3


async def test_the_first_miss_of_a_window_fetches_little(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, device := sample(16), first_window_bytes=2 * CHUNK, window_bytes=8 * CHUNK
    )
    asked = bench.store.requests

    def span(first: int, end: int) -> tuple[int, int]:
        return device.spans[first][0], sum(size for _, size in device.spans[first:end])

    async with bench.running():
        await bench.reader().read(3 * CHUNK, CHUNK)
        await bench.reader().read(7 * CHUNK, CHUNK)  # near the first: the rest of the window
        assert (asked[0], sorted(asked[1:])) == (span(2, 4), [span(0, 2), span(4, 8)])
        del asked[:]
        await bench.reader().read(8 * CHUNK, CHUNK)  # right behind what is here
        assert asked == [span(8, 16)]


async def test_zeros_are_not_fetched(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(8, zeros=(0, 1, 2, 3, 5)))
    async with bench.running() as filler:
        assert await bench.reader().read(0, 4 * CHUNK) == bytes(4 * CHUNK)
        assert bench.store.requests == []
        assert await bench.reader().read(0, 8 * CHUNK) == device.content
        # A chunk of zeros takes no room in the pack: its neighbours lie side by side.
        assert len(bench.store.requests) == 1
        assert filler.status().data[0].present_bytes == 8 * CHUNK


@pytest.mark.parametrize("gap_bytes", [0, 2 * CHUNK])
async def test_a_gap_that_is_here_is_fetched_through_if_it_is_small(
    tmp_path: Path, gap_bytes: int
) -> None:
    bench = Bench(tmp_path, sample(16), gap_bytes=gap_bytes, window_bytes=16 * CHUNK)
    async with bench.running() as filler:
        digest = bench.samples[0].digest
        filler.prefetch(Prefetch(digest=digest, spans=[(7, 1)]))
        await until(lambda: filler.status().data[0].present_bytes == CHUNK)
        await bench.reader().read(0, 16 * CHUNK)
    assert len(bench.store.requests) == (2 if gap_bytes else 3)


async def test_a_wrong_answer_is_fetched_once_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    bench.store.flipped, bench.store.flips_left = {device.spans[2][0] + 9}, 1
    async with bench.running() as filler:
        assert await bench.reader().read(0, 4 * CHUNK) == device.content
        assert bench.store.requests[1:] == [device.spans[2]]
        assert not filler.status().data[0].failing


async def test_a_chunk_that_stays_wrong_fails_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    bench.store.flipped = {device.spans[2][0] + 9}
    async with bench.running() as filler:
        assert await read_chunk(bench.reader(), 1) == chunk_of(device, 1)
        with pytest.raises(DataUnavailable, match="does not match its digest"):
            await bench.reader().read(2 * CHUNK, CHUNK)
        assert await read_chunk(bench.reader(), 3) == chunk_of(device, 3)
        status = filler.status().data[0]
        assert status.failing
        assert status.present_bytes == 3 * CHUNK
        data = (tmp_path / "cache" / device.digest[7:] / "data").read_bytes()
        assert data[2 * CHUNK : 3 * CHUNK] == bytes(CHUNK)


@pytest.mark.parametrize("trouble", ["short", "unavailable", "unforeseen", "gone", "os"])
async def test_no_trouble_of_the_store_becomes_bytes(tmp_path: Path, trouble: str) -> None:
    bench = Bench(tmp_path, device := sample(4), attempts=2)
    match trouble:
        case "short":
            bench.store.short_by = 5
        case "unavailable":
            bench.store.fails = Unavailable("dead")
        case "unforeseen":
            bench.store.fails = ValueError("a bug")
        case "os":
            bench.store.fails = OSError(5, "broken")
        case _:
            bench.store.blobs.clear()
    async with bench.running():
        with pytest.raises(DataUnavailable):
            await bench.reader().read(0, CHUNK)
        with pytest.raises(DataUnavailable):
            await bench.reader().read(CHUNK, CHUNK)
        with pytest.raises(DataUnavailable):
            await bench.reader().ensure(0, CHUNK)
        assert bench.reader().read_now(0, CHUNK) is None
        tries = {"gone": 1, "unforeseen": 1}.get(trouble, 2)
        assert len(bench.store.requests) == tries
    assert (tmp_path / "cache" / device.digest[7:] / "map").read_bytes() == bytes(4)


async def test_requests_at_once_are_bounded_and_fair(tmp_path: Path) -> None:
    one, other = sample(32, seed=1), sample(8, seed=2)
    bench = Bench(tmp_path, one, other, parallel=2)
    bench.store.gate = anyio.Event()
    done: list[str] = []

    async with bench.running(), anyio.create_task_group() as readers:

        async def read(name: str, device: Sample, chunk: int) -> None:
            await bench.reader(device).read(chunk * CHUNK, CHUNK)
            done.append(name)

        for chunk in range(0, 32, 4):
            readers.start_soon(read, "one", one, chunk)
        await until(lambda: len(bench.store.requests) == 2)
        for chunk in range(0, 8, 4):
            readers.start_soon(read, "other", other, chunk)
        await anyio.wait_all_tasks_blocked()
        bench.store.gate.set()
    assert bench.store.most_at_once == 2
    assert set(done[2:6]) == {"one", "other"}, "the late device waits for all of the first"


async def test_prefetched_chunks_are_few_requests(tmp_path: Path) -> None:
    few = {"gap_bytes": CHUNK + 64, "range_bytes": 1 << 20, "parallel": 1}
    bench = Bench(tmp_path, device := sample(64), **few)
    async with bench.running() as filler:
        spans = [(40, 2), (0, 3), (4, 4), (43, 1), (63, 5), (-4, 2)]
        filler.prefetch(Prefetch(digest=device.digest, spans=spans))
        await until(lambda: filler.status().data[0].present_bytes == 11 * CHUNK)
        assert len(bench.store.requests) == 3
        assert bench.store.requests[0][0] == device.spans[40][0], "what is wanted first comes first"
        filler.prefetch(Prefetch(digest=device.digest, spans=spans))
        await read_chunk(bench.reader(), 40, 2)
        assert len(bench.store.requests) == 3


async def test_who_waits_comes_before_a_prefetch(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(64), parallel=1, range_bytes=4 * CHUNK + 200)
    bench.store.gate = anyio.Event()
    async with bench.running() as filler, anyio.create_task_group() as readers:
        filler.prefetch(Prefetch(digest=device.digest, spans=[(0, 64)]))
        await until(lambda: bool(bench.store.requests))

        async def read() -> None:
            assert await bench.reader().read(60 * CHUNK, CHUNK) == chunk_of(device, 60)

        readers.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        bench.store.gate.set()
        await until(lambda: filler.status().data[0].present_bytes == 64 * CHUNK)
    offsets = [offset for offset, _ in bench.store.requests]
    assert offsets[1] == device.spans[60][0], "the range was queued last and is wanted now"
    assert len(offsets) == len(set(offsets)) == 16, "nothing is fetched twice"


async def test_others_have_their_turns_while_a_prefetch_is_taken_in(tmp_path: Path) -> None:
    count = 8 * SLICE
    bench = Bench(tmp_path, device := sample(count, zeros=tuple(range(1, count))))
    async with bench.running() as filler:
        filler.prefetch(Prefetch(digest=device.digest, spans=[(0, count)] * count))
        seen: set[int] = set()
        while (present := filler.status().data[0].present_bytes) < count * CHUNK:
            seen.add(present)
            await anyio.lowlevel.checkpoint()
    assert len(seen) > 4, "it took everything in at once"


async def test_prefetching_what_is_not_open(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    async with bench.running(opened=False) as filler:
        with pytest.raises(NotFound):
            filler.prefetch(Prefetch(digest=device.digest, spans=[(0, 1)]))


async def test_ensure_says_when_it_cannot_keep(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sample(64), budget_bytes=CHUNK, front="fanotify")
    async with bench.running():
        with pytest.raises(StorageFull):
            await bench.reader().ensure(0, 9 * CHUNK)


async def test_a_full_cache_is_said_and_so_is_that_there_is_room_again(tmp_path: Path) -> None:
    one, other = sample(8, seed=1), sample(8, seed=2)
    bench = Bench(
        tmp_path, one, other, budget_bytes=9 * CHUNK, front="fanotify", probe_every_s=0.05
    )
    heard: list[DataEvent] = []
    async with bench.running() as filler, anyio.create_task_group() as group:

        async def listen() -> None:
            async for event in filler.events():
                heard.append(event)  # noqa: PERF401 - it is looked at meanwhile

        group.start_soon(listen)
        await bench.reader(one).ensure(0, 8 * CHUNK)
        with pytest.raises(StorageFull, match="raise cache_mb"):
            await bench.reader(other).ensure(0, CHUNK)
        await until(lambda: len(heard) == 1)
        status = filler.status().data[1]
        assert status.failing
        assert "cache_mb" in status.last_error
        with pytest.raises(StorageFull):
            await bench.reader(other).ensure(4 * CHUNK, CHUNK)
        await filler.close(one.digest)
        await until(lambda: len(heard) == 2)
        await bench.reader(other).ensure(0, 8 * CHUNK)
        group.cancel_scope.cancel()
    assert [(each.digest, each.failing) for each in heard] == [
        (other.digest, True),
        (other.digest, False),
    ]
    assert heard[0].code == StorageFull.code
    assert "cache is full" in heard[0].message
    assert "raise cache_mb" in heard[0].message


async def test_a_device_that_is_closed_fails_nobody_any_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(8), attempts=1)
    bench.store.fails = Unavailable("dead")
    heard: list[DataEvent] = []
    async with bench.running() as filler, anyio.create_task_group() as group:

        async def listen() -> None:
            async for event in filler.events():
                heard.append(event)  # noqa: PERF401 - it is looked at meanwhile

        group.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(DataUnavailable):
            await bench.reader().read(0, CHUNK)
        await filler.close(device.digest)
        await until(lambda: len(heard) == 2)
        group.cancel_scope.cancel()
    assert [(each.failing, each.code) for each in heard] == [
        (True, DataUnavailable.code),
        (False, DataUnavailable.code),
    ]


async def test_opening_waits_for_a_close_that_is_under_way(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    bench.store.hangs = True
    async with bench.running() as filler, anyio.create_task_group() as group:
        await filler._lock.acquire()  # so that both wait, and the close comes first
        group.start_soon(filler.close, device.digest)
        await anyio.wait_all_tasks_blocked()
        before = bench.reader()
        with filler._budget._devices[device.digest].groups.pin(0, 1):  # somebody still reads
            group.start_soon(filler.open, device.request(tmp_path))
            await anyio.wait_all_tasks_blocked()
            filler._lock.release()
            await anyio.wait_all_tasks_blocked()
            assert bench.front.readers == {}, "its files are not closed yet"
        await until(lambda: bool(bench.front.readers))
        assert bench.reader() is not before


async def test_closing_waits_for_readers_and_gives_up_fetches(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    bench.store.hangs = True
    seen: list[str] = []
    async with bench.running() as filler, anyio.create_task_group() as readers:
        reader = bench.reader()

        async def read() -> None:
            with pytest.raises(DataUnavailable, match="given up"):
                await reader.read(0, CHUNK)
            seen.append("refused")

        readers.start_soon(read)
        await until(lambda: bool(bench.store.requests))
        await filler.close(device.digest)
        assert seen == ["refused"]
        assert bench.front.readers == {}
        assert filler.status().data == []
        bench.store.hangs = False
        await filler.open(device.request(tmp_path))
        assert await bench.reader().read(0, CHUNK) == chunk_of(device, 0)
