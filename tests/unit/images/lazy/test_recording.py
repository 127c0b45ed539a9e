"""What a sandbox reads is written down, and outlives the worker."""

from __future__ import annotations

import errno
from pathlib import Path

import anyio
import pytest

from dsec.base.errors import Conflict, InvalidRequest, NotFound, StorageFull, Unsupported
from dsec.images.lazy.opened import OpenList, write_list
from dsec.wire.filler import ReadSpan, StartRecording
from tests.unit.images.lazy.bench import CHUNK, Bench, Sample, chunk_of, read_chunk, sample, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(jumping_clock: object) -> object:
    return jumping_clock


def request(*devices: Sample, name: str = "boot") -> StartRecording:
    return StartRecording(recording=name, digests=[device.digest for device in devices])


async def test_first_reads_are_noted_with_their_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, one := sample(16, seed=1), two := sample(16, seed=2))
    async with bench.running() as filler:
        started = await filler.start_recording(request(one, two))
        names = [f"{each.digest[7:]}.boot" for each in (one, two)]
        assert [Path(path).name for path in started.paths] == names
        await bench.reader(one).read(0, 16 * CHUNK)  # not on the recording's account
        alias, other = bench.reader(one, "boot"), bench.reader(two, "boot")
        await anyio.sleep(1.0)
        assert await read_chunk(alias, 4, 2) == chunk_of(one, 4, 2)
        assert await read_chunk(alias, 6) == chunk_of(one, 6)
        await anyio.sleep(0.5)
        assert await read_chunk(alias, 3, 5) == chunk_of(one, 3, 5)
        await other.ensure(0, 1)
        assert await other.read(CHUNK, CHUNK) == chunk_of(two, 1)
        found = filler.recording("boot")
    assert found.digests == [one.digest, two.digest]
    assert found.chunk_bytes == CHUNK
    assert found.spans == [
        ReadSpan(1000, 0, 4, 3),
        ReadSpan(1500, 0, 3, 1),
        ReadSpan(1500, 0, 7, 1),
        ReadSpan(1500, 1, 0, 2),
    ], "and nothing of the window around a miss"


async def test_a_recording_outlives_the_worker(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(16))
    async with bench.running() as filler:
        await filler.start_recording(request(device))
        await read_chunk(bench.reader(device, "boot"), 2)
        notes = bench.config.home / "recordings" / "boot"
        await until(lambda: notes.exists() and bool(notes.read_bytes()))
        with notes.open("ab") as file:
            file.write(b"[17,0,")  # what a kill leaves of a line
        await filler.close(device.digest)
    bench.front.readers.clear()
    (bench.config.home / "recordings" / "forgotten").touch()
    async with bench.running(opened=False) as filler:
        assert set(bench.front.readers) == {f"{device.digest[7:]}.boot"}
        await anyio.sleep(1.0)
        await read_chunk(bench.reader(device, "boot"), 2, 2)
        first, second = filler.recording("boot").spans
        assert (first.first, first.count) == (2, 1)
        assert (second.first, second.count) == (3, 1)
        assert second.at_ms >= first.at_ms + 1000
        await filler.end_recording("boot")
        assert bench.front.readers == {}
        assert filler.status().data == [], "the recording was the last to use it"
    assert list((bench.config.home / "recordings").iterdir()) == []


async def test_ending_takes_the_aliases_and_nothing_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device := sample(16))
    async with bench.running() as filler:
        await filler.start_recording(request(device))
        await filler.start_recording(request(device, name="other"))
        await filler.end_recording("boot")
        await filler.end_recording("boot")
        with pytest.raises(NotFound):
            filler.recording("boot")
        hexdigest = device.digest[7:]
        assert set(bench.front.readers) == {hexdigest, f"{hexdigest}.other"}
        assert await read_chunk(bench.reader(device, "other"), 1) == chunk_of(device, 1)
        assert len(filler.recording("other").spans) == 1


async def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    one, coarse = sample(16), sample(4, seed=3, chunk_bytes=2 * CHUNK)
    bench = Bench(tmp_path, one, coarse)
    async with bench.running() as filler:
        with pytest.raises(NotFound):
            await filler.start_recording(request(sample(3)))
        with pytest.raises(InvalidRequest):
            await filler.start_recording(request(one, coarse))
        with pytest.raises(InvalidRequest):
            await filler.start_recording(request(one, one))
        await filler.start_recording(request(one))
        again = await filler.start_recording(request(one))
        assert len(again.paths) == 1
        with pytest.raises(Conflict):
            await filler.start_recording(request(coarse))


async def test_what_cannot_be_shown_leaves_nothing_behind(tmp_path: Path) -> None:
    bench = Bench(tmp_path, one := sample(16, seed=1), two := sample(16, seed=2))
    async with bench.running(opened=False) as filler:
        await filler.open(one.request(tmp_path))
        bench.front.refuses = two.digest[7:]
        with pytest.raises(Unsupported):
            await filler.open(two.request(tmp_path))
        assert [each.digest for each in filler.status().data] == [one.digest]
        bench.front.refuses = ""
        await filler.open(two.request(tmp_path))
        bench.front.refuses = f"{two.digest[7:]}.boot"
        with pytest.raises(Unsupported):
            await filler.start_recording(request(one, two))
        assert set(bench.front.readers) == {one.digest[7:], two.digest[7:]}
        await filler.close(one.digest)
        assert [each.digest for each in filler.status().data] == [two.digest]


class FullDisk:
    """Where the list of what is open is written; full when told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        monkeypatch.setattr("dsec.images.lazy.filler.write_list", self._write)

    def _write(self, file: Path, opened: OpenList) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "full", str(file))
        write_list(file, opened)


async def test_a_full_run_directory_keeps_nothing_open_and_nothing_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, disk = Bench(tmp_path, device := sample(4)), FullDisk(monkeypatch)
    async with bench.running() as filler:
        await filler.start_recording(StartRecording(recording="boot", digests=[device.digest]))
        disk.full = True
        await filler.close(device.digest)
        await filler.end_recording("boot")
        assert bench.front.readers == {}
        assert filler.status().data == []
        with anyio.fail_after(60), pytest.raises(StorageFull):
            await filler.open(device.request(tmp_path))
        assert bench.front.readers == {}
        disk.full = False
        with anyio.fail_after(60):
            await filler.open(device.request(tmp_path))
        assert await bench.reader().read(0, CHUNK) == chunk_of(device, 0)


async def test_a_recording_that_cannot_be_written_down_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, disk = Bench(tmp_path, device := sample(4)), FullDisk(monkeypatch)
    wanted = StartRecording(recording="boot", digests=[device.digest])
    async with bench.running() as filler:
        disk.full = True
        with pytest.raises(StorageFull):
            await filler.start_recording(wanted)
        assert set(bench.front.readers) == {device.digest[7:]}
        with pytest.raises(NotFound):
            filler.recording("boot")
        disk.full = False
        await filler.start_recording(wanted)
        assert filler.recording("boot").spans == []
