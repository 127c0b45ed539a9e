"""Both fronts against this kernel: EROFS mounted over a device whose data comes late, or never."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import pytest

from dsec.base.errors import Conflict, InternalError, InvalidRequest, Unsupported
from dsec.images.lazy import front_fuse, kernel_side
from dsec.images.lazy.config import FrontName
from dsec.images.lazy.front_fanotify import FanotifyFront
from dsec.images.lazy.front_fuse import FuseFront, node_of
from dsec.images.lazy.interface import Front
from dsec.images.lazy.places import Places
from dsec.linux import fanotify, fuse, mounts
from tests.kernel.erofs_over import (
    MAP,
    Image,
    make_image,
    mounted,
    outcome,
    start_cat,
    start_reader,
)
from tests.kernel.filler_process import CHUNK, SlowReader

pytestmark = [pytest.mark.anyio, pytest.mark.needs_root]

T = TypeVar("T")
FRONTS: list[FrontName] = ["fuse", "fanotify"]
EIO = f"errno {errno.EIO}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return make_image(tmp_path_factory.mktemp("image"))


def descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    before = descriptors()
    yield tmp_path
    assert mounts.mounts_under(tmp_path) == []
    assert descriptors() == before


@pytest.fixture(params=FRONTS)
def kind(request: pytest.FixtureRequest) -> FrontName:
    name: FrontName = request.param
    return name


async def aside(func: Callable[[], T]) -> T:
    """Off the loop, which must answer the kernel meanwhile."""
    return await anyio.to_thread.run_sync(func)


async def run(*argv: str | Path) -> bytes:
    """A program's output. What this process reads through fanotify itself is not held up."""
    return await aside(lambda: bytes(subprocess.check_output(argv, timeout=100)))


@asynccontextmanager
async def inside(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    value = await aside(manager.__enter__)
    try:
        yield value
    finally:
        with anyio.CancelScope(shield=True):
            await aside(partial(manager.__exit__, None, None, None))


@contextmanager
def opened_front(kind: FrontName, place: Path) -> Iterator[Front]:
    if kind == "fuse":
        with kernel_side.mounted(place / "data") as descriptor:
            yield FuseFront(descriptor, place / "data", 0)
    else:
        group = fanotify.open_group()
        try:
            yield FanotifyFront(group, 0)
        finally:
            os.close(group)


@asynccontextmanager
async def shown(
    kind: FrontName, place: Path, content: bytes, name: str = "device"
) -> AsyncIterator[tuple[Front, SlowReader, Path]]:
    """A served device."""
    reader = SlowReader(content, place / "cache")
    with contextlib.closing(reader), opened_front(kind, place) as front:
        device = await front.expose(name, reader)
        async with front.serving():
            yield front, reader, device


@asynccontextmanager
async def environment(
    kind: FrontName, place: Path, image: Image
) -> AsyncIterator[tuple[Front, SlowReader, Path]]:
    """An image mounted over a served device."""
    content = image.blob.read_bytes()
    async with shown(kind, place, content) as (front, reader, device):
        async with inside(mounted(image, device, place / "mnt")) as root:
            yield front, reader, root


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - it is the kernel that is waited for
            await anyio.sleep(0.005)


# -- right bytes -------------------------------------------------------------------------------


async def test_parallel_readers_get_the_right_bytes(
    kind: FrontName, place: Path, image: Image
) -> None:
    async with environment(kind, place, image) as (_, reader, root):
        readers = [start_reader(root, seed) for seed in range(6)]
        said = [await aside(partial(outcome, each)) for each in readers]
        assert said == [image.digests()] * 6
        assert reader.fetches >= image.blob.stat().st_size // CHUNK


async def test_what_is_here_is_read_without_fetching(
    kind: FrontName, place: Path, image: Image
) -> None:
    async with environment(kind, place, image) as (_, reader, root):
        await reader.ensure(0, reader.size_bytes)
        before = reader.fetches
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()
        assert reader.fetches == before
        assert reader.hits > 0


async def test_programs_run_and_files_are_mapped(
    kind: FrontName, place: Path, image: Image
) -> None:
    async with environment(kind, place, image) as (_, _reader, root):
        ran = await run(root / "program", root / "file01")
        mapped = await run(sys.executable, "-S", "-c", MAP, root / "file02")
        assert ran == (image.tree / "file01").read_bytes()
        assert mapped == (image.tree / "file02").read_bytes()


async def test_any_user_reads_what_the_image_lets_them(
    kind: FrontName, place: Path, image: Image
) -> None:
    async with environment(kind, place, image) as (_, _reader, root):
        argv = ["/bin/cat", "file03"]
        read = await aside(lambda: subprocess.check_output(argv, cwd=root, user=65534))
        assert bytes(read) == (image.tree / "file03").read_bytes()


# -- the store waits, fails, comes back --------------------------------------------------------


async def test_reads_that_wait_hold_up_no_others(
    kind: FrontName, place: Path, image: Image
) -> None:
    async with environment(kind, place, image) as (_, reader, root):
        reader.missing = lambda _chunk: True
        stuck = [start_cat(root / f"file{number:02}") for number in range(4, 20)]
        await until(lambda: reader.waiting >= 16)
        reader.missing = lambda _chunk: False
        assert await run("/bin/cat", root / "file22") == (image.tree / "file22").read_bytes()
        assert [process.poll() for process in stuck] == [None] * 16
        reader.released.set()
        assert [await aside(process.wait) for process in stuck] == [0] * 16


async def test_no_data_is_an_error_until_there_is_data(
    kind: FrontName, place: Path, image: Image
) -> None:
    async with environment(kind, place, image) as (_, reader, root):
        reader.failing = True
        failed = await aside(lambda: outcome(start_reader(root)))
        assert set(failed.values()) == {EIO}
        reader.failing = False
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()


async def test_a_bug_in_the_reader_is_an_error_for_who_reads(
    kind: FrontName, place: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_offset: int, _length: int) -> bytes:
        raise ZeroDivisionError

    async with environment(kind, place, image) as (_, reader, root):
        monkeypatch.setattr(reader, "read", broken)
        monkeypatch.setattr(reader, "ensure", broken)
        assert set((await aside(lambda: outcome(start_reader(root)))).values()) == {EIO}


async def test_a_reader_that_waits_can_be_killed(
    kind: FrontName, place: Path, image: Image
) -> None:
    async with environment(kind, place, image) as (_, reader, root):
        reader.missing = lambda _chunk: True
        stuck = start_reader(root)
        await until(lambda: reader.waiting > 0)
        stuck.kill()
        assert await aside(partial(stuck.wait, 60)) == -signal.SIGKILL
        stuck.communicate()
        reader.released.set()
        reader.missing = lambda _chunk: False
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()


async def test_a_withdrawn_device_gives_errors(kind: FrontName, place: Path, image: Image) -> None:
    async with environment(kind, place, image) as (front, reader, root):
        await run("/bin/cat", root / "file05")
        await front.withdraw("device")
        await front.withdraw("device")
        said = await aside(lambda: outcome(start_reader(root)))
        # What the kernel has of it is right and stays.
        assert said.pop("file05") == image.digests()["file05"]
        assert set(said.values()) == {EIO}
        await front.expose("device", reader)
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()


async def test_a_withdrawal_ends_reads_that_wait(place: Path, image: Image) -> None:
    async with environment("fuse", place, image) as (front, reader, root):
        reader.missing = lambda _chunk: True
        stuck = start_reader(root)
        await until(lambda: reader.waiting > 0)
        await front.withdraw("device")
        reader.released.set()
        assert set((await aside(partial(outcome, stuck))).values()) == {EIO}


# -- the FUSE mount ----------------------------------------------------------------------------


async def test_the_mount_lists_its_devices_to_root_alone(place: Path) -> None:
    content = os.urandom(CHUNK + 4096)
    async with shown("fuse", place, content, "sha256:ab") as (front, reader, device):
        for number in range(300):
            await front.expose(f"{number:03}-{'x' * 200}", reader)
        names = await aside(lambda: sorted(device.parent.iterdir()))
        assert len(names) == 301
        assert device in names
        found = await aside(device.stat)
        assert (found.st_size, found.st_mode, found.st_uid) == (len(content), 0o100400, 0)
        assert found.st_ino == node_of("sha256:ab", len(content))
        assert await aside(device.read_bytes) == content
        mount = mounts.mount_at(device.parent)
        assert mount is not None
        assert set(mount.options.split(",")) >= {"ro", "nosuid", "nodev", "noexec"}


@pytest.mark.parametrize(
    ("what", "number"),
    [
        (lambda device: (device.parent / "other").stat(), errno.ENOENT),
        (lambda device: (device / "below").stat(), errno.ENOTDIR),
        (lambda device: os.open(device, os.O_RDWR), errno.EROFS),
        (lambda device: (device.parent / "new").mkdir(), errno.EROFS),
        (lambda device: os.getxattr(device, "user.x"), errno.EOPNOTSUPP),
    ],
)
async def test_all_else_is_refused(
    place: Path, what: Callable[[Path], object], number: int
) -> None:
    async with shown("fuse", place, bytes(4096)) as (_, _reader, device):
        with pytest.raises(OSError, match=rf"Errno {number}\b"):
            await aside(partial(what, device))
        assert await aside(lambda: os.statvfs(device).f_namemax) == 255


async def test_a_name_may_come_back_with_another_size(place: Path) -> None:
    async with shown("fuse", place, bytes(4096)) as (front, _reader, device):
        assert (await aside(device.stat)).st_size == 4096
        old = await aside(lambda: os.open(device, os.O_RDONLY))
        with contextlib.closing(SlowReader(b"y" * 8192, place / "second")) as second:
            await front.expose("device", second)
            assert await aside(device.read_bytes) == b"y" * 8192
            with pytest.raises(OSError, match=r"Errno 5"):
                await aside(lambda: os.read(old, 10))
            await front.withdraw("device")
            with pytest.raises(FileNotFoundError):
                await aside(device.read_bytes)
        os.close(old)


async def test_a_killed_reader_of_the_file_itself_is_let_go(place: Path) -> None:
    async with shown("fuse", place, os.urandom(CHUNK)) as (_, reader, device):
        reader.missing = lambda _chunk: True
        stuck = start_cat(device)
        await until(lambda: reader.waiting > 0)
        stuck.kill()
        assert await aside(partial(stuck.wait, 60)) == -signal.SIGKILL


async def test_a_successor_answers_what_was_left(place: Path, image: Image) -> None:
    reader = SlowReader(image.blob.read_bytes(), place / "cache")
    reader.missing = lambda _chunk: True
    data = place / "data"
    with contextlib.closing(reader), kernel_side.mounted(data) as descriptor:
        async with contextlib.AsyncExitStack() as stack:
            first = FuseFront(descriptor, data, 0)
            device = await first.expose("device", reader)
            async with first.serving():
                root = await stack.enter_async_context(
                    inside(mounted(image, device, place / "mnt"))
                )
                stuck = [start_reader(root, seed) for seed in range(4)]
                await until(lambda: reader.waiting > 1)
            reader.missing = lambda _chunk: False
            second = FuseFront(descriptor, data, 1)
            await second.expose("device", reader)
            async with second.serving():
                for each in stuck:
                    assert await aside(partial(outcome, each)) == image.digests()
                await stack.aclose()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "x" * 256])
async def test_names_that_cannot_be_files_are_refused(place: Path, name: str) -> None:
    async with shown("fuse", place, bytes(4096)) as (front, reader, _device):
        with pytest.raises(InvalidRequest):
            await front.expose(name, reader)


async def test_two_names_with_one_number_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown("fuse", place, bytes(4096)) as (front, reader, device):
        number = node_of("device", 4096)
        monkeypatch.setattr(front_fuse, "node_of", lambda _name, _size: number)
        with pytest.raises(Conflict):
            await front.expose("other", reader)
        assert await aside(device.read_bytes) == bytes(4096)


async def test_an_unmount_from_outside_ends_the_serving(place: Path) -> None:
    async def unmount_and_wait() -> None:
        async with shown("fuse", place, bytes(4096)) as (_, _reader, device):
            await aside(lambda: mounts.umount(device.parent))
            with anyio.fail_after(60):
                await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await unmount_and_wait()
    assert caught.group_contains(InternalError, match="unmounted")


def test_numbers_of_files_follow_from_their_names() -> None:
    assert node_of("a", 4096) == node_of("a", 4096)
    assert len({node_of("a", 4096), node_of("b", 4096), node_of("a", 8192), fuse.ROOT, 0}) == 5


# -- fanotify ----------------------------------------------------------------------------------


async def test_the_cache_file_itself_is_the_device(place: Path) -> None:
    async with shown("fanotify", place, os.urandom(CHUNK)) as (_, reader, device):
        assert device == place / "cache"
        assert await run("/bin/cat", device) == reader.content


async def test_a_hit_takes_no_task(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_offset: int, _length: int) -> None:
        raise ZeroDivisionError

    async with shown("fanotify", place, os.urandom(2 * CHUNK)) as (_, reader, device):
        await reader.ensure(0, reader.size_bytes)
        monkeypatch.setattr(reader, "ensure", broken)
        assert await run("/bin/cat", device) == reader.content


async def test_what_is_marked_and_open_is_in_use(place: Path, image: Image) -> None:
    async with shown("fanotify", place, image.blob.read_bytes()) as (front, reader, device):
        assert isinstance(front, FanotifyFront)
        other = place / "other"
        other.touch()
        directory = os.open(place, os.O_RDONLY)

        def in_use() -> bool:
            return fanotify.is_in_use(front.group, directory)

        assert in_use()
        reader.close()
        reader.cache_fd = os.open(other, os.O_RDONLY)
        assert not in_use()
        async with inside(mounted(image, device, place / "mnt")) as root:
            assert in_use()
            file = await aside(lambda: os.open(root / "file00", os.O_RDONLY))
        assert in_use(), "detached, but somebody is still in it"
        os.close(file)
        await until(lambda: not in_use())
        os.close(directory)


async def test_two_names_of_one_file_go_one_by_one(place: Path) -> None:
    async with shown("fanotify", place, os.urandom(2 * CHUNK)) as (front, reader, device):
        await front.expose("recording", reader)
        await front.withdraw("recording")
        assert await run("/bin/cat", device) == reader.content


async def test_own_writes_through_later_descriptors_go_through(place: Path) -> None:
    async with shown("fanotify", place, os.urandom(CHUNK)) as (_, reader, device):
        file = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        await aside(lambda: os.pwrite(file, b"x", 0))
        os.close(file)
        assert reader.fetches == 0


async def test_a_file_system_without_events_is_refused(place: Path) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory) as elsewhere:
        reader = SlowReader(bytes(4096), Path(elsewhere) / "cache")
        with contextlib.closing(reader), opened_front("fanotify", place) as front:
            with pytest.raises(Unsupported):
                await front.expose("device", reader)
        places = Places(place)
        with pytest.raises(Unsupported, match="ext4"):
            with kernel_side.opened("fanotify", places, Path(elsewhere)):
                pass
