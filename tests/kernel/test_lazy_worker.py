"""The whole filler, killed while environments are read: keeper, worker, core, a store, both fronts."""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import anyio
import anyio.to_thread
import pytest

from dsec.base.errors import Unavailable, Unsupported
from dsec.images.lazy.holder import is_held, read_holder
from dsec.images.lazy.node import NodeFiller
from dsec.images.lazy.places import Places
from dsec.images.service import ImageService
from dsec.linux import mounts, pidfd
from dsec.wire.public_v1 import EnvironmentRef
from tests.kernel.erofs_over import READ
from tests.kernel.nodes import MIB, Node, imported, noise, seen, tar_of
from tests.kernel.serving import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.needs_root]

T = TypeVar("T")
FILES = {f"data/{number:02}": noise(MIB, number) for number in range(48)}
RIGHT = {name[5:]: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
EIO = f"errno {errno.EIO}"
READ_ALL = [sys.executable, "-S", "-c", READ]
KILLS, READERS = 5, 4
PATIENCE_S = 60.0
IMAGE = EnvironmentRef(image="base")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


MakeNode = Callable[[str, Path], Node]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    """Makes nodes of which nothing is left, however the test ends."""
    made: list[Node] = []

    def make(name: str, store: Path) -> Node:
        made.append(Node(name, store, tmp_path))
        return made[-1]

    yield make
    detach_all(tmp_path)
    for node in made:
        if node.run.exists():  # else the test has cleaned it
            end(node)


def detach_all(root: Path) -> None:
    for mount in mounts.mounts_under(root):
        mounts.umount(Path(mount.target), detach=True)


def end(node: Node) -> None:
    """End a filler that somebody left: its worker dies with the keeper, its anchor by itself."""
    processes = Processes(node)
    detach_all(node.run)
    holder = read_holder(processes.places.lock)
    if holder is not None:
        with pidfd.opened(holder.pid) as descriptor:
            if descriptor is not None:
                pidfd.kill(descriptor)
                assert pidfd.wait_end(descriptor, PATIENCE_S)
    detach_all(node.run)
    eventually(processes.gone, PATIENCE_S)
    node.clean()


@pytest.fixture
async def store(tmp_path: Path, make_node: MakeNode) -> Path:
    """With the image."""
    (tmp_path / "store").mkdir()
    node = make_node("publisher", tmp_path / "store")
    async with node.running() as images:
        await imported(images, "base", tar_of(FILES))
    node.clean()
    return tmp_path / "store"


class Processes:
    """A node's filler as /proc has it."""

    def __init__(self, node: Node) -> None:
        self.places = Places(node.config.home)
        self.seen: set[int] = set()

    def keeper(self) -> int:
        found: list[int] = []

        def there() -> bool:
            holder = read_holder(self.places.lock)
            found[:] = [] if holder is None else [holder.pid]
            return bool(found)

        eventually(there, PATIENCE_S)
        self.seen.update(found)
        return found[0]

    def worker(self, after: int) -> int:
        """The worker that follows another one."""
        found: list[int] = []

        def there() -> bool:
            found[:] = [pid for pid in self._children() if pid != after]
            return bool(found)

        eventually(there, PATIENCE_S)
        self.seen.update(found)
        return found[0]

    def _children(self) -> list[int]:
        keeper = self.keeper()
        found = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in found}
        return [pid for pid, file in commands.items() if b"lazy.worker" in text_of(file)]

    def gone(self) -> bool:
        held = is_held(self.places.lock) or self.places.anchor.exists()
        return not held and not any(Path(f"/proc/{pid}").exists() for pid in self.seen)


def text_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@asynccontextmanager
async def cold_node(front: str, node: Node) -> AsyncIterator[tuple[ImageService, Path, Processes]]:
    """The image as a sandbox sees it on a node that has fetched nothing."""
    # Small windows, one at a time: the readers are not done before the last kill.
    node.options |= {"front": front, "window_bytes": 65536, "parallel": 1}
    processes = Processes(node)
    async with node.running() as images:
        async with seen(images, IMAGE, "s1", node.state.parent) as root:
            yield images, root, processes
    await aside(lambda: eventually(processes.gone, PATIENCE_S))
    node.clean()


async def aside(func: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(func)


class Readers:
    """Processes that read all files, each in an order of its own."""

    def __init__(self, root: Path, count: int) -> None:
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.said: list[dict[str, str]] = [{} for _ in range(count)]
        self._processes = [self._start(root, number) for number in range(count)]
        self._threads = [threading.Thread(target=partial(self._listen, n)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)

    @staticmethod
    def _start(root: Path, seed: int) -> subprocess.Popen[str]:
        argv = [*READ_ALL, str(root), str(seed)]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    def _listen(self, number: int) -> None:
        output = self._processes[number].stdout
        assert output is not None
        with output:
            for line in output:
                self._lines.put((number, line))

    def hear(self, count: int) -> None:
        """Wait until they have read so many files more."""
        for _ in range(count):
            number, line = self._lines.get(timeout=PATIENCE_S)
            name, got = line.split(maxsplit=1)
            self.said[number][name] = got.strip()

    def finish(self) -> list[dict[str, str]]:
        """What they have read: per file its digest, or `errno N`."""
        assert None in [process.poll() for process in self._processes], "they were done too early"
        assert [process.wait(PATIENCE_S) for process in self._processes] == [0] * len(self.said)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self.hear(self._lines.qsize())
        return self.said


def read_all(root: Path) -> dict[str, str]:
    files: Iterator[Path] = (root / name for name in RIGHT)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def kill_often(processes: Processes, readers: Readers, seed: int) -> None:
    """At its start, in the middle of its start, or after some reads."""
    chance = random.Random(seed)
    worker = 0
    for _ in range(KILLS):
        worker = processes.worker(after=worker)
        readers.hear(chance.randrange(4))
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("front", ["fuse", "fanotify"])
async def test_every_byte_is_right_however_often_the_worker_is_killed(
    store: Path, make_node: MakeNode, front: str, seed: int
) -> None:
    async with cold_node(front, make_node("cold", store)) as (_, root, processes):
        with Readers(root / "data", READERS) as readers:
            await aside(lambda: kill_often(processes, readers, seed))
            finished = await aside(readers.finish)
        for said in finished:
            wrong = {got for name, got in said.items() if got != RIGHT[name]}
            # fanotify's readers may see EIO; never anything else, and never zeros.
            assert wrong <= ({EIO} if front == "fanotify" else set())
            assert said.keys() == RIGHT.keys()
        assert await aside(lambda: read_all(root / "data")) == RIGHT


@pytest.mark.parametrize("front", ["fuse", "fanotify"])
async def test_a_worker_whose_cache_is_damaged_comes_back(
    store: Path, tmp_path: Path, make_node: MakeNode, front: str
) -> None:
    async with cold_node(front, make_node("cold", store)) as (images, root, processes):
        worker = processes.worker(after=0)
        assert await aside((root / "data/00").read_bytes) == FILES["data/00"]
        for file in (tmp_path / "cold/cache").glob("*/map"):
            file.unlink()
        os.kill(worker, signal.SIGKILL)
        await aside(lambda: processes.worker(after=worker))
        with anyio.fail_after(PATIENCE_S):
            done = await anyio.run_process([*READ_ALL, str(root / "data"), "0"])
        said = dict(line.split(" ", 1) for line in done.stdout.decode().splitlines())
        wrong = {got for name, got in said.items() if got != RIGHT[name]}
        # What is mounted has the old file, which is nobody's now.
        assert wrong == ({EIO} if front == "fanotify" else set())
        assert await front_of(images) == front


async def front_of(images: ImageService) -> str:
    """As the filler says, once its worker listens: it serves readers before."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            with suppress(Unavailable):
                return (await images.store()).front
            await anyio.sleep(0.02)


def kill_keeper_and_worker(processes: Processes, readers: Readers) -> None:
    keeper, worker = processes.keeper(), processes.worker(after=0)
    readers.hear(3)
    kill_both(keeper, worker)


def kill_both(keeper: int, worker: int) -> None:
    """Neither does anything after the other has died."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (keeper, worker):
            os.kill(pid, number)
    with pidfd.opened(keeper) as descriptor:
        assert descriptor is None or pidfd.wait_end(descriptor, PATIENCE_S)


async def test_with_fanotify_mounts_survive_keeper_and_worker(
    store: Path, make_node: MakeNode
) -> None:
    async with cold_node("fanotify", make_node("cold", store)) as (images, root, processes):
        with Readers(root / "data", READERS) as readers:
            await aside(lambda: kill_keeper_and_worker(processes, readers))
            finished = await aside(readers.finish)
        for said in finished:
            assert {got for name, got in said.items() if got != RIGHT[name]} <= {EIO}
            assert said.keys() == RIGHT.keys()
        await aside(processes.keeper)
        environment = await images.environments.compose(IMAGE)
        assert await aside(lambda: reads_right(root / "data"))
        assert images.environments.faults(environment, "s1") == []


async def test_an_edge_that_starts_takes_over_what_an_anchor_kept(
    store: Path, make_node: MakeNode
) -> None:
    node = make_node("cold", store)
    node.options["front"] = "fanotify"
    processes = Processes(node)
    async with node.running() as images:
        environment = await images.environments.compose(IMAGE)
        layers = await images.environments.mount(environment, "s1")
        worker = processes.worker(after=0)
    await aside(lambda: kill_both(processes.keeper(), worker))
    async with node.running() as images:  # the sandbox lives on
        images.environments.rebuild_pins([("s1", environment.layers)])
        assert images.environments.faults(environment, "s1") == []
        assert await aside(lambda: read_all(layers[-1] / "data")) == RIGHT
        await images.environments.release("s1")
    await aside(lambda: eventually(processes.gone, PATIENCE_S))
    node.clean()


def reads_right(root: Path) -> bool:
    """Once the next worker answers; until then reads are denied."""

    def right() -> bool:
        try:
            return read_all(root) == RIGHT
        except OSError as error:
            assert error.errno == errno.EIO
            return False

    eventually(right, PATIENCE_S)
    return True


async def test_a_filler_is_started_ahead(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("early", tmp_path)
    filler = NodeFiller(node.config)
    await filler.warm()
    assert filler.started
    await filler.shutdown()
    await filler.aclose()
    await aside(lambda: eventually(Processes(node).gone, PATIENCE_S))
    node.clean()


async def test_one_that_cannot_be_started_ahead_is_nobodys_error(
    tmp_path: Path, make_node: MakeNode
) -> None:
    node = make_node("early", tmp_path)
    node.options["front"] = "fanotify"
    os.symlink("/dev/shm", node.config.cache)  # noqa: PTH211
    filler = NodeFiller(node.config)
    await filler.warm()
    assert not filler.started
    with pytest.raises(Unsupported, match="ext4"):
        await filler.client()
    await filler.aclose()
    await aside(lambda: eventually(Processes(node).gone, PATIENCE_S))
    node.clean()
