"""The keeper, and that a worker may die at any moment: its readers get right data, or EIO at worst."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
import pytest

from dsec.base.errors import Conflict, Unavailable, Unsupported
from dsec.images.lazy.config import FillerConfig, FrontName
from dsec.images.lazy.holder import Holder, is_held, read_holder
from dsec.images.lazy.places import Places
from dsec.images.lazy.starting import ensure_filler
from dsec.linux import mounts, pidfd
from tests.kernel.erofs_over import Image, make_image, mounted, outcome, start_reader
from tests.kernel.filler_process import fetch_note
from tests.kernel.serving import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.needs_root]

T = TypeVar("T")
KEEPER = (sys.executable, str(Path(__file__).with_name("filler_process.py")), "keeper")
EIO = f"errno {errno.EIO}"
PATIENCE_S = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return make_image(tmp_path_factory.mktemp("image"))


@dataclass
class Filler:
    """A node's filler, started as the edge does."""

    place: Path
    store: Path
    front: FrontName = "fuse"
    options: dict[str, str] = field(default_factory=dict)
    read_timeout_s: float = 0.0
    seen: set[int] = field(default_factory=set)

    @property
    def config(self) -> FillerConfig:
        return FillerConfig(
            store=str(self.store),
            cache=str(self.place / "cache"),
            run=str(self.place / "run"),
            front=self.front,
            store_options=self.options,
            read_timeout_s=self.read_timeout_s,
        )

    @property
    def places(self) -> Places:
        return Places(self.config.home)

    async def ensure(self, timeout_s: float = PATIENCE_S) -> bool:
        return await ensure_filler(self.config, keeper=KEEPER, timeout_s=timeout_s)

    @property
    def holder(self) -> Holder:
        holder = read_holder(self.places.lock)
        assert holder is not None
        self.seen.add(holder.pid)
        return holder

    def workers(self) -> list[int]:
        return [pid for pid in children_of(self.holder.pid) if not is_anchor(pid)]

    def anchor(self) -> int:
        """The anchor; of a keeper that is its parent."""
        (pid,) = [pid for pid in children_of(self.holder.pid) if is_anchor(pid)]
        self.seen.add(pid)
        return pid

    def worker(self, after: int = 0) -> int:
        """The worker that runs, another one than `after`."""
        found: list[int] = []

        def there() -> bool:
            found[:] = [pid for pid in self.workers() if pid != after]
            return bool(found)

        eventually(there, PATIENCE_S)
        self.seen.add(found[0])
        return found[0]

    def device(self) -> Path:
        if self.front == "fuse":
            return self.places.data / "blob"
        return self.place / "cache/blob"

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the keeper and wait for it and its lock."""
        holder = read_holder(self.places.lock)
        if holder is not None:
            self.seen.add(holder.pid)
            with pidfd.opened(holder.pid) as descriptor:
                assert descriptor is not None
                signal.pidfd_send_signal(descriptor, number)
                assert pidfd.wait_end(descriptor, PATIENCE_S)
        eventually(lambda: not is_held(self.places.lock), PATIENCE_S)


@pytest.fixture
def filler(tmp_path: Path, image: Image) -> Iterator[Filler]:
    store = tmp_path / "store"
    store.mkdir()
    (store / "blob").symlink_to(image.blob)
    (tmp_path / "cache").mkdir()
    made = Filler(tmp_path, store)
    yield made
    made.end()
    eventually(lambda: not [pid for pid in made.seen if runs(pid)], PATIENCE_S)
    left = mounts.mounts_under(tmp_path)
    for mount in left:
        mounts.umount(Path(mount.target), detach=True)
    assert left == []


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def is_anchor(pid: int) -> bool:
    try:
        return b"dsec.images.lazy.anchor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def links(pid: int) -> list[str]:
    """What a process has open."""
    return [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]


def runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def aside(func: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(func)


def read_all_while(worker_dies: Callable[[], None], root: Path) -> list[dict[str, str]]:
    """What readers get that were there when it happened."""
    readers = [start_reader(root, seed) for seed in range(4)]
    worker_dies()
    assert None in [reader.poll() for reader in readers], "all had read before the last death"
    return [outcome(reader) for reader in readers]


# -- the worker dies ---------------------------------------------------------------------------


@pytest.mark.parametrize("front", ["fuse", "fanotify"])
async def test_readers_survive_the_worker(filler: Filler, image: Image, front: FrontName) -> None:
    filler.front = front
    filler.options = {"delay_s": "0.03"}  # it is killed long before the first data came
    await filler.ensure()

    def kill_five() -> None:
        worker = 0
        for _ in range(5):
            worker = filler.worker(after=worker)
            note = fetch_note(filler.place / "cache", worker)
            eventually(note.exists, PATIENCE_S)
            os.kill(worker, signal.SIGKILL)

    with mounted(image, filler.device(), filler.place / "mnt") as root:
        said = await aside(lambda: read_all_while(kill_five, root))
        right = image.digests()
        for each in said:
            wrong = {name: got for name, got in each.items() if got != right[name]}
            # fanotify's readers may see EIO; never anything else, and never zeros.
            assert set(wrong.values()) <= ({EIO} if front == "fanotify" else set())
            assert each.keys() == right.keys()
        assert await aside(lambda: outcome(start_reader(root))) == right


def serves(pid: int) -> bool:
    """Whether a worker has come so far that it answers the kernel: it has an epoll."""
    with suppress(OSError):
        return "anon_inode:[eventpoll]" in links(pid)
    return False


async def test_a_keeper_killed_too_fails_reads_and_the_next_one_works(
    filler: Filler, image: Image
) -> None:
    filler.options = {"delay_s": "0.02"}
    await filler.ensure()
    old, worker = filler.holder.pid, filler.worker()

    def kill_keeper() -> None:
        eventually(fetch_note(filler.place / "cache", worker).exists, PATIENCE_S)
        os.kill(old, signal.SIGKILL)

    with mounted(image, filler.device(), filler.place / "mnt") as root:
        said = await aside(lambda: read_all_while(kill_keeper, root))
        assert EIO in {got for each in said for got in each.values()}
        right = image.digests()
        assert {got for each in said for name, got in each.items() if got != right[name]} == {EIO}
    eventually(lambda: not runs(worker), PATIENCE_S)
    assert mounts.is_mounted(filler.places.data)  # but nobody serves it
    with pytest.raises(OSError, match=f"Errno {errno.ENOTCONN}"):
        filler.device().stat()
    filler.options = {}
    assert await filler.ensure()
    assert filler.holder.pid != old
    assert len([m for m in mounts.list_mounts() if m.target == str(filler.places.data)]) == 1
    with mounted(image, filler.device(), filler.place / "mnt") as root:
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()


@pytest.mark.parametrize("front", ["fuse", "fanotify"])
async def test_readers_survive_a_worker_that_hangs(
    filler: Filler, image: Image, front: FrontName
) -> None:
    filler.front, filler.read_timeout_s = front, 1.0  # so it is given up after ten seconds
    filler.options = {"delay_s": "0.02"}
    await filler.ensure()
    worker = filler.worker()

    def hang() -> None:
        eventually(fetch_note(filler.place / "cache", worker).exists, PATIENCE_S)
        os.kill(worker, signal.SIGSTOP)

    with mounted(image, filler.device(), filler.place / "mnt") as root:
        right = image.digests()
        for each in await aside(lambda: read_all_while(hang, root)):
            wrong = {name: got for name, got in each.items() if got != right[name]}
            # As when it is killed: fanotify's readers may see EIO; never anything else.
            assert set(wrong.values()) <= ({EIO} if front == "fanotify" else set())
            assert each.keys() == right.keys()
        assert not runs(worker)
        assert "worker hangs" in filler.places.log.read_text()
        assert await aside(lambda: outcome(start_reader(root))) == right


async def test_a_mount_over_a_worker_that_hangs_is_made_in_the_end(
    filler: Filler, image: Image
) -> None:
    filler.read_timeout_s = 1.0
    await filler.ensure()
    os.kill(filler.worker(), signal.SIGSTOP)
    target = filler.place / "mnt"
    target.mkdir()
    await aside(lambda: mounts.mount_erofs(image.meta, target, [filler.device()]))
    try:
        assert await aside(lambda: outcome(start_reader(target))) == image.digests()
    finally:
        mounts.umount(target, detach=True)


def kill_together(*pids: int) -> None:
    """None of them does anything after the first has died."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@pytest.mark.parametrize("how", ["keeper first", "worker first", "together", "in order"])
async def test_an_anchor_denies_until_the_next_keeper_serves_the_same_mounts(
    filler: Filler, image: Image, how: str
) -> None:
    filler.front, filler.options = "fanotify", {"delay_s": "0.02"}
    assert await filler.ensure()
    keeper, worker, anchor = filler.holder.pid, filler.worker(), filler.anchor()

    def end_both() -> None:
        eventually(fetch_note(filler.place / "cache", worker).exists, PATIENCE_S)
        match how:
            case "keeper first":
                os.kill(keeper, signal.SIGKILL)
            case "worker first":
                kill_together(worker, keeper)
            case "together":
                kill_together(keeper, worker)
            case _:
                os.kill(keeper, signal.SIGTERM)

    with mounted(image, filler.device(), filler.place / "mnt") as root:
        right = image.digests()
        for each in await aside(lambda: read_all_while(end_both, root)):
            assert {got for name, got in each.items() if got != right[name]} == {EIO}
            assert each.keys() == right.keys()
        eventually(lambda: not is_held(filler.places.lock), PATIENCE_S)
        assert runs(anchor)
        again = await aside(lambda: outcome(start_reader(root)))
        assert EIO in again.values()

        assert not await filler.ensure(), "the mounts are good"
        assert filler.holder.inherited
        assert await aside(lambda: outcome(start_reader(root))) == right
        assert runs(anchor)
    filler.end()
    eventually(lambda: not runs(anchor), PATIENCE_S)


async def test_an_anchor_nobody_needs_ends(filler: Filler, image: Image) -> None:
    filler.front = "fanotify"
    await filler.ensure()
    anchor = filler.anchor()
    with mounted(image, filler.device(), filler.place / "mnt") as root:
        inside = os.open(root / "file00", os.O_RDONLY)
        filler.end(signal.SIGKILL)
    # The mount is detached and seen nowhere, but it lives.
    assert await aside(lambda: denied(inside))
    assert runs(anchor)
    os.close(inside)
    eventually(lambda: not runs(anchor), PATIENCE_S)
    assert not filler.places.anchor.exists()
    assert await filler.ensure(), "there was nothing to take over"
    with mounted(image, filler.device(), filler.place / "mnt") as root:
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()


def denied(file: int) -> bool:
    try:
        os.pread(file, 4096, 0)
    except OSError as error:
        return error.errno == errno.EIO
    return False


async def test_an_anchor_that_dies_is_replaced(filler: Filler, image: Image) -> None:
    filler.front = "fanotify"
    await filler.ensure()
    first, worker = filler.anchor(), filler.worker()
    with mounted(image, filler.device(), filler.place / "mnt") as root:
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not runs(first), PATIENCE_S)
        second = filler.worker(after=worker)
        assert second != worker
        await filler.ensure()
        assert await aside(lambda: outcome(start_reader(root, 1))) == image.digests()
        third = filler.anchor()
        filler.end(signal.SIGKILL)
        assert runs(third)
    eventually(lambda: not runs(third), PATIENCE_S)


async def test_signals_do_not_end_an_anchor(filler: Filler) -> None:
    filler.front = "fanotify"
    await filler.ensure()
    anchor = filler.anchor()
    pending = f"/proc/{anchor}/status"
    eventually(lambda: blocks(pending, signal.SIGTERM), PATIENCE_S)
    os.kill(anchor, signal.SIGTERM)
    filler.worker()
    assert not await filler.ensure()
    assert runs(anchor)


def blocks(status: str, number: signal.Signals) -> bool:
    lines = Path(status).read_text().splitlines()
    (mask,) = [line.split()[1] for line in lines if line.startswith("SigBlk:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


async def test_an_anchor_has_nothing_of_its_keepers_environment(
    filler: Filler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    filler.front = "fanotify"
    await filler.ensure()
    worker, anchor = filler.worker(), filler.anchor()
    assert b"AWS_SECRET_ACCESS_KEY=secret" in variables(worker), "it needs it"
    eventually(lambda: is_anchor(anchor), PATIENCE_S)
    assert [each.partition(b"=")[0] for each in variables(anchor)] == [b"PYTHONPATH"]


def variables(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")[:-1]


async def test_fuse_waits_for_mounts_of_fanotify(filler: Filler, image: Image) -> None:
    filler.front = "fanotify"
    await filler.ensure()
    with mounted(image, filler.device(), filler.place / "mnt"):
        filler.end()
        filler.front = "fuse"
        with pytest.raises(Unavailable, match="live on"):
            await filler.ensure()
    assert await filler.ensure()
    with mounted(image, filler.device(), filler.place / "mnt") as root:
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()


async def test_ten_ends_in_a_minute_are_enough(filler: Filler) -> None:
    filler.options = {"exit": "3"}
    with pytest.raises(Unavailable, match="too many ends"):
        await filler.ensure()
    eventually(lambda: not is_held(filler.places.lock), PATIENCE_S)
    assert not mounts.is_mounted(filler.places.data)


async def test_with_fanotify_a_keeper_without_worker_denies(filler: Filler, image: Image) -> None:
    filler.front = "fanotify"
    await filler.ensure()
    with mounted(image, filler.device(), filler.place / "mnt") as root:
        filler.options = {"exit": "3"}
        with pytest.raises(Unavailable, match="too many ends"):
            await filler.ensure()
        assert filler.holder.resting
        said = await aside(lambda: outcome(start_reader(root)))
        assert set(said.values()) == {EIO}
        filler.options = {}
        assert not await filler.ensure()
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()


async def test_a_worker_that_ends_in_order_ends_all(filler: Filler) -> None:
    filler.options = {"exit": "0"}
    with pytest.raises(Unavailable, match="ended before it answered"):
        await filler.ensure()
    assert not mounts.is_mounted(filler.places.data)


# -- starting, and other settings --------------------------------------------------------------


async def test_it_is_started_once_and_outlives_its_starter(filler: Filler) -> None:
    started: list[bool] = []

    async def ensure() -> None:
        started.append(await filler.ensure())

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(ensure)
    assert sorted(started) == [False, False, False, True]
    assert not await filler.ensure()
    pid = filler.holder.pid
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"  # noqa: PTH115
    assert pid not in children_of(os.getpid())
    assert [child for child in children_of(os.getpid()) if not runs(child)] == []


async def test_keeper_and_worker_have_no_descriptors_but_their_own(filler: Filler) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.set_inheritable(theirs.fileno(), True)
        await filler.ensure()
    worker = filler.worker()
    places = filler.places
    held = links(filler.holder.pid)
    assert len([what for what in held if what.startswith("pipe:")]) == 1  # the worker's heartbeat
    assert {what for what in held if not what.startswith(("anon_inode:[pidfd]", "pipe:"))} == {
        "/dev/null",
        "/dev/fuse",
        str(places.log),
        str(places.lock),
    }
    assert links(worker).count("/dev/fuse") == 1
    assert [what for what in links(worker) if what in held and what.startswith("pipe:")]
    assert str(places.lock) not in links(worker)


async def test_other_settings_take_a_new_worker_and_keep_what_is_mounted(
    filler: Filler, image: Image
) -> None:
    await filler.ensure()
    before, worker = filler.holder, filler.worker()
    with mounted(image, filler.device(), filler.place / "mnt") as root:
        filler.options = {"delay_s": "0.001"}
        assert not await filler.ensure()
        assert filler.holder.pid == before.pid
        assert filler.holder.config != before.config
        assert filler.workers() != [worker]
        assert await aside(lambda: outcome(start_reader(root))) == image.digests()


async def test_another_front_is_refused_while_one_runs(filler: Filler) -> None:
    await filler.ensure()
    before = filler.holder
    filler.front = "fanotify"
    with pytest.raises(Conflict, match="fuse"):
        await filler.ensure()
    filler.front = "fuse"
    assert not await filler.ensure()
    assert filler.holder == before


async def test_settings_that_cannot_be_read_change_nothing(filler: Filler) -> None:
    await filler.ensure()
    before, worker = filler.holder, filler.worker()
    good = filler.places.config.read_bytes()
    other = msgspec.structs.replace(filler.config, front="fanotify")
    for bad, said in ((b"{", "the settings stay"), (msgspec.json.encode(other), "another front")):
        filler.places.config.write_bytes(bad)
        os.kill(before.pid, signal.SIGHUP)
        eventually(lambda said=said: said in filler.places.log.read_text(), PATIENCE_S)
    filler.places.config.write_bytes(good)
    assert filler.workers() == [worker]


async def test_a_second_keeper_is_refused(filler: Filler) -> None:
    await filler.ensure()
    argv = [*KEEPER, "--background", str(filler.places.config)]
    done = await aside(lambda: subprocess.run(argv, capture_output=True, check=False, timeout=60))
    assert done.returncode == 1
    assert b'"conflict"' in done.stderr
    assert runs(filler.holder.pid)


async def test_the_reason_why_it_cannot_start_comes_back(filler: Filler) -> None:
    filler.front = "fanotify"
    (filler.place / "cache").rmdir()
    (filler.place / "cache").symlink_to("/dev/shm")
    with pytest.raises(Unsupported, match="ext4"):
        await filler.ensure()


async def test_one_that_never_answers_is_given_up_with_its_log(filler: Filler) -> None:
    filler.places.home.mkdir(parents=True)
    filler.config.socket.mkdir()  # nothing can listen there
    with pytest.raises(Unavailable, match=r"(?s)log:.*worker"):
        await filler.ensure(timeout_s=2.0)


async def test_in_the_foreground_it_ends_on_sigterm_and_leaves_nothing(filler: Filler) -> None:
    filler.places.home.mkdir(parents=True)
    filler.places.config.write_bytes(msgspec.json.encode(filler.config))
    argv = [*KEEPER, str(filler.places.config)]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    eventually(lambda: read_holder(filler.places.lock) is not None, PATIENCE_S)
    worker = filler.worker()
    eventually(lambda: serves(worker), PATIENCE_S)
    process.terminate()
    assert await aside(lambda: process.wait(60)) == 0
    assert not runs(worker)
    assert not mounts.is_mounted(filler.places.data)
