"""What stays in the cache, what goes, and what a restart makes of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from dsec.base.errors import InvalidRequest, StorageFull
from dsec.images.lazy import cache as cache_files
from dsec.images.lazy.cache import State
from dsec.linux import files, mounts
from dsec.linux.mounts import MountFlag
from dsec.wire.filler import Prefetch
from tests.unit.images.lazy.bench import (
    CHUNK,
    GROUP,
    Bench,
    Sample,
    chunk_of,
    read_chunk,
    sample,
    until,
)

pytestmark = pytest.mark.anyio


def folder(bench: Bench, device: Sample) -> Path:
    return Path(bench.config.cache) / device.digest[7:]


def state_of(bench: Bench, device: Sample) -> State:
    return msgspec.json.decode((folder(bench, device) / "state").read_bytes(), type=State)


async def test_what_is_here_is_not_fetched_again_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(16))
    async with bench.running():
        await bench.reader().read(0, GROUP)
    bench.front.readers.clear()
    async with bench.running(opened=False):
        # Opened again by itself, before anybody asks: the kernel may have it open.
        assert await bench.reader().read(0, GROUP) == chunk_of(device, 0, 4)
        assert len(bench.store.requests) == 1
        await bench.reader().read(GROUP, CHUNK)
        assert len(bench.store.requests) == 2


async def test_what_was_closed_stays_cached_and_is_not_shown_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    async with bench.running() as filler:
        await bench.reader().read(0, CHUNK)
        await filler.close(device.digest)
        await filler.close(device.digest)
        assert filler.status().used_bytes >= GROUP
    bench.front.readers.clear()
    async with bench.running(opened=False) as filler:
        assert bench.front.readers == {}
        assert filler.status().used_bytes >= GROUP
        await filler.open(device.request(tmp_path))
        assert await bench.reader().read(0, GROUP) == device.content
        assert len(bench.store.requests) == 1


async def test_the_map_of_another_boot_counts_only_if_all_was_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, part := sample(8, seed=1), whole := sample(4, seed=2))
    async with bench.running():
        await bench.reader(part).read(0, CHUNK)
        await bench.reader(whole).read(0, CHUNK)
        await until(lambda: state_of(bench, whole).complete)
    bench.front.readers.clear()
    for module in ("filler", "opened", "budget"):
        monkeypatch.setattr(f"dsec.images.lazy.{module}.boot_id", lambda: "another")
    async with bench.running(opened=False):
        assert not bench.front.readers, "nobody has it open after a boot"
    async with bench.running() as filler:
        present = {each.digest: each.present_bytes for each in filler.status().data}
        assert present == {part.digest: 0, whole.digest: 4 * CHUNK}
        assert await bench.reader(part).read(0, CHUNK) == chunk_of(part, 0)
        assert len(bench.store.requests) == 3
        assert state_of(bench, part).boot_id == "another"


@pytest.mark.parametrize("damage", ["state", "map", "data", "chunk_bytes"])
async def test_a_damaged_directory_counts_for_nothing(tmp_path: Path, damage: str) -> None:
    bench = Bench(tmp_path, device := sample(8))
    async with bench.running() as filler:
        await bench.reader().read(0, CHUNK)
        await filler.close(device.digest)
    victim = folder(bench, device)
    match damage:
        case "state":
            (victim / "state").write_bytes(b"{")
        case "chunk_bytes":
            device = Sample(device.content, 2 * CHUNK)
            bench.store.blobs[device.pack_digest] = device.pack
        case name:
            os.truncate(victim / name, 5)
    async with bench.running(opened=False) as filler:
        await filler.open(device.request(tmp_path))
        assert filler.status().data[0].present_bytes == 0
        assert await bench.reader().read(0, 8 * CHUNK) == device.content


async def test_sizes_and_table_must_fit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    request = device.request(tmp_path)
    wrong: list[dict[str, Any]] = [
        {"size_bytes": 5 * CHUNK},
        {"size_bytes": 4097},
        {"table": "/nowhere"},
    ]
    async with bench.running(opened=False) as filler:
        for change in wrong:
            with pytest.raises(InvalidRequest):
                await filler.open(msgspec.structs.replace(request, **change))
        await filler.open(request)


async def test_opening_again_is_harmless(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(4))
    async with bench.running() as filler, anyio.create_task_group() as group:
        reader = bench.reader()
        for _ in range(4):
            group.start_soon(filler.open, device.request(tmp_path))
        assert bench.reader() is reader


async def test_the_budget_holds_and_every_byte_is_right(tmp_path: Path) -> None:
    samples = [sample(64, seed=seed) for seed in range(3)]
    bench = Bench(tmp_path, *samples, budget_bytes=10 * GROUP)
    dice = random.Random(7)
    async with bench.running() as filler:
        for _ in range(400):
            device, chunk = dice.choice(samples), dice.randrange(64)
            assert await read_chunk(bench.reader(device), chunk) == chunk_of(device, chunk)
            assert filler.status().used_bytes <= 10 * GROUP
        assert filler.status().evicted_bytes > 10 * GROUP
        present = sum(each.present_bytes for each in filler.status().data)
        assert 5 * GROUP <= present <= 10 * GROUP


async def test_eviction_under_readers_never_shows_a_hole(tmp_path: Path) -> None:
    samples = [sample(64, seed=seed) for seed in range(2)]
    bench = Bench(tmp_path, *samples, budget_bytes=5 * GROUP)

    async def read(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            device, chunk = dice.choice(samples), dice.randrange(60)
            count = dice.randrange(1, 5)
            found = await read_chunk(bench.reader(device), chunk, count)
            assert found == chunk_of(device, chunk, count)

    async with bench.running() as filler:
        async with anyio.create_task_group() as readers:
            for seed in range(12):
                readers.start_soon(read, seed)
        assert filler.status().evicted_bytes > 0
        assert filler.status().used_bytes <= 5 * GROUP


async def test_what_is_used_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(64), budget_bytes=6 * GROUP)
    async with bench.running():
        await read_chunk(bench.reader(), 0)
        for chunk in [*range(8, 64, 4)] * 4:
            await read_chunk(bench.reader(), chunk)
            assert await read_chunk(bench.reader(), 0) == chunk_of(device, 0)
        fetched = [offset for offset, _ in bench.store.requests]
        assert fetched.count(0) <= 2, "what is read all the time was thrown out again and again"


async def test_closed_devices_go_first_and_whole(tmp_path: Path) -> None:
    samples = [sample(16, seed=seed) for seed in range(3)]
    bench = Bench(tmp_path, *samples, budget_bytes=12 * GROUP)
    async with bench.running() as filler:
        for device in samples:
            await bench.reader(device).read(0, 16 * CHUNK)
        for device in samples[:2]:
            await filler.close(device.digest)
        last = sample(16, seed=9)
        bench.store.blobs[last.pack_digest] = last.pack
        await filler.open(last.request(tmp_path))
        assert await bench.reader(last).read(0, 16 * CHUNK) == last.content
        assert not folder(bench, samples[0]).exists()
        assert folder(bench, samples[1]).exists()
        assert filler.status().data[0].present_bytes == 16 * CHUNK
        # And it can be had again.
        await filler.open(samples[0].request(tmp_path))
        assert await bench.reader(samples[0]).read(0, 16 * CHUNK) == samples[0].content


async def test_of_a_complete_device_the_seal_goes_before_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, device := sample(16), other := sample(16, seed=1))
    bench.config = msgspec.structs.replace(bench.config, budget_bytes=6 * GROUP)
    sealed: list[bool] = []
    punch = files.punch_hole

    def watched(descriptor: int, offset: int, length: int) -> None:
        sealed.append(state_of(bench, device).complete)
        punch(descriptor, offset, length)

    monkeypatch.setattr(cache_files, "punch_hole", watched)
    async with bench.running():
        await bench.reader().read(0, 16 * CHUNK)
        await until(lambda: state_of(bench, device).complete)
        while not sealed:  # the one who seals it holds it a moment longer
            await bench.reader(other).read(0, 16 * CHUNK)
        assert not any(sealed)
        assert await bench.reader().read(0, 16 * CHUNK) == device.content


async def test_with_fanotify_nothing_of_an_open_device_goes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(64), budget_bytes=4 * GROUP, front="fanotify")
    async with bench.running() as filler:
        for chunk in range(0, 16, 4):
            await bench.reader().ensure(chunk * CHUNK, CHUNK)
        with pytest.raises(StorageFull):
            await bench.reader().ensure(20 * CHUNK, CHUNK)
        assert filler.status().data[0].present_bytes == 4 * GROUP
        assert filler.status().evicted_bytes == 0
        assert await bench.reader().read(20 * CHUNK, CHUNK) == chunk_of(device, 20)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A cache on a disk of half a MiB."""
    target = tmp_path / "tiny"
    target.mkdir()
    mounts.mount("tmpfs", target, "tmpfs", MountFlag.NOSUID, "size=512k")
    try:
        yield target
    finally:
        mounts.umount(target)


@pytest.mark.needs_root
@pytest.mark.parametrize("front", ["fuse", "fanotify"])
async def test_a_full_disk_is_no_error_for_readers(tmp_path: Path, tiny: Path, front: str) -> None:
    device = sample(256)
    bench = Bench(tmp_path, device, cache=str(tiny), front=front)
    async with bench.running() as filler:
        for chunk in range(256):
            assert await read_chunk(bench.reader(), chunk) == chunk_of(device, chunk)
        # Those who come back get the same, from the cache or from the store.
        for chunk in range(0, 256, 7):
            assert await read_chunk(bench.reader(), chunk) == chunk_of(device, chunk)
        assert 0 < filler.status().data[0].present_bytes < 512 << 10
        assert not filler.status().data[0].failing
        assert bool(filler.status().evicted_bytes) == (front == "fuse")


@pytest.mark.needs_root
async def test_no_room_for_a_map(tmp_path: Path, tiny: Path) -> None:
    (tiny / "filling").write_bytes(bytes(500 << 10))
    bench = Bench(tmp_path, sample(2048), cache=str(tiny))
    async with bench.running(opened=False) as filler:
        with pytest.raises(StorageFull):
            await filler.open(bench.samples[0].request(tmp_path))


async def test_a_prefetch_larger_than_the_budget_does_no_harm(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(64), budget_bytes=4 * GROUP)
    async with bench.running() as filler:
        filler.prefetch(Prefetch(digest=device.digest, spans=[(0, 64)]))
        assert await bench.reader().read(50 * CHUNK, CHUNK) == chunk_of(device, 50)
        assert filler.status().used_bytes <= 4 * GROUP
