"""A store that fails, hangs, lies, and comes back; on a clock that jumps."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from dsec.base.errors import DataUnavailable, Unavailable
from dsec.wire.filler import DataEvent
from tests.unit.images.lazy.bench import (
    CHUNK,
    Bench,
    chunk_of,
    read_chunk,
    sample,
    until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(jumping_clock: object) -> object:
    return jumping_clock


async def fails(bench: Bench, chunk: int, match: str | None = None) -> float:
    """How long a read took to fail."""
    begun = anyio.current_time()
    with pytest.raises(DataUnavailable, match=match):
        await bench.reader().read(chunk * CHUNK, CHUNK)
    return anyio.current_time() - begun


async def test_a_failure_that_passes_is_not_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4), attempts=3)
    bench.store.fails = Unavailable("busy")
    async with bench.running() as filler, anyio.create_task_group() as group:

        async def mend() -> None:
            await until(lambda: len(bench.store.requests) == 2)
            bench.store.fails = None

        group.start_soon(mend)
        assert await bench.reader().read(0, CHUNK) == chunk_of(device, 0)
        assert not filler.status().data[0].errors


async def test_a_hanging_store_fails_after_the_stated_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sample(64), attempts=3, attempt_timeout_s=10.0, pause_s=0.1)
    bench.store.hangs = True
    async with bench.running():
        assert await fails(bench, 0, "no answer within 10 s") == pytest.approx(30.3)
        assert len(bench.store.requests) == 3
        # The kernel asks again at once, several times: no further wait, no further request.
        assert await fails(bench, 0) == await fails(bench, 20) == 0.0
        assert len(bench.store.requests) == 3


async def test_no_read_waits_longer_than_the_limit_however_long_the_line(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, sample(64), sample(64, seed=1), parallel=1, attempts=3, attempt_timeout_s=10.0
    )
    bench.store.hangs = True
    took: list[float] = []

    async def read(device: int, chunk: int) -> None:
        begun = anyio.current_time()
        with pytest.raises(DataUnavailable):
            await bench.reader(bench.samples[device]).read(chunk * CHUNK, CHUNK)
        took.append(anyio.current_time() - begun)

    async with bench.running(), anyio.create_task_group() as readers:
        for device in (0, 1):
            for chunk in range(0, 64, 4):
                readers.start_soon(read, device, chunk)
    assert len(took) == 32
    assert max(took) <= bench.config.longest_read_s == 45.0


async def test_the_breaker_lets_one_attempt_through_now_and_then(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sample(64), attempts=1, retry_after_s=2.0, probe_every_s=1000.0)
    bench.store.fails = Unavailable("dead")
    async with bench.running():
        await fails(bench, 0, "dead")
        await anyio.sleep(1.9)
        await fails(bench, 8, "dead")
        assert len(bench.store.requests) == 1
        await anyio.sleep(0.2)
        bench.store.delay_s = 1.0
        async with anyio.create_task_group() as readers:
            for chunk in range(0, 64, 4):
                readers.start_soon(fails, bench, chunk)
        assert len(bench.store.requests) == 2, "one of sixteen went through"


async def test_a_reader_finds_out_that_it_works_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(8), attempts=1, probe_every_s=1000.0)
    bench.store.fails = Unavailable("dead")
    async with bench.running() as filler:
        await fails(bench, 0)
        assert filler.status().data[0].last_error.endswith("dead")
        bench.store.fails = None
        await anyio.sleep(2.1)
        assert await bench.reader().read(0, CHUNK) == chunk_of(device, 0)
        assert not filler.status().data[0].failing
        assert await bench.reader().read(4 * CHUNK, CHUNK) == chunk_of(device, 4)


async def test_events_say_when_it_fails_and_when_it_works_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(8), attempts=1, probe_every_s=3.0)
    bench.store.fails = Unavailable("dead")
    heard: list[DataEvent] = []

    async with bench.running() as filler, anyio.create_task_group() as group:

        async def listen() -> None:
            async for event in filler.events():
                heard.append(event)  # noqa: PERF401 - it is looked at meanwhile

        group.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        await fails(bench, 0)
        await until(lambda: len(heard) == 1)
        group.start_soon(listen)  # one who comes later hears of it first
        await until(lambda: len(heard) == 2)
        bench.store.fails = None
        before = len(bench.store.requests)
        await until(lambda: len(heard) == 4)  # nobody reads: the probe has noticed
        assert len(bench.store.requests) == before + 1
        group.cancel_scope.cancel()
    assert [event.failing for event in heard] == [True, True, False, False]
    assert {event.digest for event in heard} == {device.digest}
    assert heard[0].message.endswith("dead")


async def test_nothing_is_asked_while_all_is_well(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sample(8))
    async with bench.running():
        await bench.reader().read(0, CHUNK)
        await anyio.sleep(3600)
        assert len(bench.store.requests) == 1


async def test_a_wrong_chunk_is_looked_at_until_it_is_right(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(8), attempts=1, probe_every_s=3.0)
    bench.store.flipped = {device.spans[1][0] + 3, device.spans[6][0] + 3}
    async with bench.running() as filler:
        await fails(bench, 1, "does not match")
        await fails(bench, 6, "does not match")
        # Its neighbours are served all the while, and it is not asked for with every read.
        assert await read_chunk(bench.reader(), 0) == chunk_of(device, 0)
        requests = len(bench.store.requests)
        assert await fails(bench, 1, "does not match") == 0.0
        assert len(bench.store.requests) == requests
        bench.store.flipped = set()
        await until(lambda: not filler.status().data[0].failing)
        assert await bench.reader().read(0, 8 * CHUNK) == device.content


async def test_one_device_does_not_take_others_with_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dead := sample(8, seed=1), well := sample(8, seed=2), attempts=1)
    del bench.store.blobs[dead.pack_digest]
    async with bench.running() as filler:
        with pytest.raises(DataUnavailable, match="no blob"):
            await bench.reader(dead).read(0, CHUNK)
        assert await bench.reader(well).read(0, CHUNK) == chunk_of(well, 0)
        assert [each.failing for each in filler.status().data] == [True, False]


async def test_a_fetch_under_way_gives_up_when_the_device_is_known_to_fail(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sample(64), attempts=4, attempt_timeout_s=10.0)
    bench.store.hangs = True
    async with bench.running():
        begun = anyio.current_time()
        async with anyio.create_task_group() as readers:
            readers.start_soon(fails, bench, 0)
            await anyio.sleep(35)
            assert len(bench.store.requests) == 4
            readers.start_soon(fails, bench, 8)
        # The second began late and did not take its own forty seconds.
        assert anyio.current_time() - begun < 50
