"""The filler over a real Unix socket, asked by the real client."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from dsec.base.clock import SystemClock
from dsec.base.errors import (
    Conflict,
    DataUnavailable,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    Unavailable,
)
from dsec.images.lazy.client import FillerClient
from dsec.images.lazy.worker import work
from dsec.wire.filler import DataEvent, Prefetch, ReadSpan, StartRecording
from tests.unit.images.lazy.bench import CHUNK, Bench, Sample, chunk_of, sample, until

pytestmark = pytest.mark.anyio
NOWHERE = f"sha256:{'0' * 64}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def served(bench: Bench) -> AsyncIterator[FillerClient]:
    stop = anyio.Event()
    async with anyio.create_task_group() as group:

        async def run() -> None:
            arguments: Any = (bench.config, bench.front, bench.store, SystemClock(), stop)
            assert not await work(*arguments)

        group.start_soon(run)
        await until(bench.config.socket.exists)
        async with FillerClient(bench.config.socket) as client:
            yield client
        stop.set()


async def test_all_that_the_edge_asks(tmp_path: Path) -> None:
    device = sample(16)
    bench = Bench(tmp_path, device, version="1.2.3", budget_bytes=1 << 30)
    async with served(bench) as client:
        path = await client.open(device.request(tmp_path))
        assert path == await client.open(device.request(tmp_path))
        assert path == Path("/shown", device.digest[7:])
        await client.prefetch(Prefetch(digest=device.digest, spans=[(0, 4)]))
        aliases = await client.start_recording(
            StartRecording(recording="boot", digests=[device.digest])
        )
        assert [each.name for each in aliases] == [f"{device.digest[7:]}.boot"]
        alias = bench.reader(device, "boot")
        assert await alias.read(8 * CHUNK, CHUNK) == chunk_of(device, 8)
        recording = await client.recording("boot")
        assert [(each.first, each.count) for each in recording.spans] == [(8, 1)]
        assert isinstance(recording.spans[0], ReadSpan)
        await client.end_recording("boot")
        await client.end_recording("boot")
        await until(lambda: len(bench.store.requests) == 2)
        status = await client.status()
        assert (status.version, status.front, status.store) == ("1.2.3", "fuse", "fake://store")
        assert (status.budget_bytes, status.requests) == (1 << 30, 2)
        assert status.fetched_bytes == sum(length for _, length in bench.store.requests)
        assert [each.digest for each in status.data] == [device.digest]
        await client.close(device.digest)
        await client.close(device.digest)
        assert (await client.status()).data == []
        assert bench.front.readers == {}


async def test_errors_are_those_of_the_tree(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4), other := sample(4, seed=1))
    async with served(bench) as client:
        request = device.request(tmp_path)
        with pytest.raises(NotFound, match="not open"):
            await client.prefetch(Prefetch(digest=NOWHERE, spans=[]))
        with pytest.raises(NotFound):
            await client.recording("none")
        with pytest.raises(InvalidRequest, match="digest"):
            await client.close("nonsense")
        with pytest.raises(InvalidRequest, match="table"):
            await client.open(replace(request, table="/none"))
        with pytest.raises(DataUnavailable):
            await client.open(replace(request, pack_bytes=5))
        await client.open(request)
        await client.open(other.request(tmp_path))
        await client.start_recording(StartRecording(recording="r", digests=[device.digest]))
        with pytest.raises(Conflict):
            await client.start_recording(StartRecording(recording="r", digests=[other.digest]))


async def test_events_come_as_they_happen(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(8), attempts=1, probe_every_s=0.05, retry_after_s=0.05)
    heard: list[DataEvent] = []
    async with served(bench) as client, anyio.create_task_group() as group:
        await client.open(device.request(tmp_path))

        async def listen() -> None:
            async for event in client.events():
                heard.append(event)  # noqa: PERF401 - it is looked at meanwhile

        group.start_soon(listen)
        bench.store.fails = Unavailable("dead")
        with pytest.raises(DataUnavailable):
            await bench.reader().read(0, CHUNK)
        await until(lambda: len(heard) == 1)
        bench.store.fails = None
        await until(lambda: len(heard) == 2)
        group.cancel_scope.cancel()
    assert [(event.digest, event.failing) for event in heard] == [
        (device.digest, True),
        (device.digest, False),
    ]


async def test_it_answers_while_a_hundred_devices_fail(tmp_path: Path) -> None:
    devices = [sample(4, seed=seed) for seed in range(100)]
    bench = Bench(tmp_path, *devices, attempts=1, probe_every_s=0.01, retry_after_s=0.01)
    bench.store.fails = Unavailable("dead")
    failing: set[str] = set()
    ends = anyio.Event()

    async def read_on(device: Sample) -> None:
        reader = bench.reader(device)
        while not ends.is_set():
            with suppress(DataUnavailable):
                await reader.read(0, CHUNK)
            await anyio.sleep(0.05)  # as a program would, not as fast as this loop can

    async with served(bench) as client, anyio.create_task_group() as group:
        for device in devices:
            await client.open(device.request(tmp_path))
            group.start_soon(read_on, device)
        with anyio.fail_after(60):
            async for event in client.events():
                failing.add(event.digest)
                if len(failing) == len(devices):
                    break
            assert sum(each.failing for each in (await client.status()).data) == len(devices)
            again = 0
            async for _ in client.events():  # all that fail come first
                again += 1
                if again == len(devices):
                    break
        ends.set()


async def test_a_trace_of_any_length_is_taken(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(8))
    spans = [(0, 1)] * 20_000 + [(4, 1)]
    async with served(bench) as client:
        await client.open(device.request(tmp_path))
        await client.prefetch(Prefetch(digest=device.digest, spans=spans))
        await until(lambda: len(bench.store.requests) == 1)
        # Of a long list of a small device the rest says nothing new; its end came in a list of its own.
        whole = Prefetch(digest=device.digest, spans=[(2**63, 2**63)] * 20_000)
        await client.prefetch(whole)
        with pytest.raises(PayloadTooLarge):
            await client._call("POST", "/v1/prefetch", whole)


async def test_shutting_down_ends_the_work(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sample(4))
    asked: list[bool] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                never = anyio.Event()
                arguments: Any = (bench.config, bench.front, bench.store, SystemClock(), never)
                asked.append(await work(*arguments))

            group.start_soon(run)
            await until(bench.config.socket.exists)
            async with FillerClient(bench.config.socket) as client:
                await client.shutdown()
    assert asked == [True]


async def test_a_filler_that_is_away_or_mute(tmp_path: Path) -> None:
    async with FillerClient(tmp_path / "none") as client:
        with pytest.raises(Unavailable, match="away"):
            await client.status()
        with pytest.raises(Unavailable, match="away"):
            async for _ in client.events():
                pass
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        async with FillerClient(tmp_path / "mute", timeout_s=0.2) as client:
            with pytest.raises(Unavailable, match="in time"):
                await client.status()
