"""Control groups that stand still and give their memory back, on this host's own kernel."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.swap import swap
from dsec.kit.recall import Recall
from dsec.linux import pidfd
from dsec.linux.cgroup import freezing, groups, reclaiming, refilling
from dsec.linux.cgroup.detect import detect
from dsec.linux.cgroup.interface import Bounds, Layout
from dsec.linux.cgroup.plan import plan
from dsec.linux.long_writes import write_long
from tests.kernel.test_edge import aether

__all__ = ["aether"]
pytestmark = [pytest.mark.needs_root]

NODE = "kpau"
SANDBOX = "sbx1"
MIB = 1 << 20
BOUNDS = Bounds(memory_bytes=256 * MIB, cpu_cores=1, pids=32)
SIZE_MB = 48
WORK = f"""
import mmap, os, sys
memory = mmap.mmap(-1, {SIZE_MB << 20}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), 4096):
    memory[at] = 1 + at % 251
file = open(sys.argv[1], "rb")
while file.read(1 << 20):
    pass
out = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
print("ready", flush=True)
for line in sys.stdin:
    total = sum(memory[at] != 1 + at % 251 for at in range(0, len(memory), 4096))
    print(total, flush=True)
"""


def kill(layout: Layout) -> None:
    """End all of it, asked again as the edge does: on a slow host one try is not patient enough."""
    for _ in range(200):
        with contextlib.suppress(TimeoutError):
            return groups.kill(layout, SANDBOX)
    return groups.kill(layout, SANDBOX)


@pytest.fixture
def layout() -> Iterator[Layout]:
    """The groups of a node with one sandbox, made as the launcher makes them."""
    found = detect(NODE)
    groups.prepare(found)
    for directory in plan(found, SANDBOX, BOUNDS).directories:
        Path(directory.path).mkdir()
        for name, text in directory.writes:
            (Path(directory.path) / name).write_text(text)
    yield found
    kill(found)
    groups.remove(found, SANDBOX)
    groups.retire(found)
    assert not groups.sandboxes(found)


class Worker:
    """A process in the sandbox's groups, with memory of its own and a file it has read."""

    def __init__(self, layout: Layout, directory: Path) -> None:
        made = plan(layout, SANDBOX, BOUNDS)
        self._places = [Path(made.work_v2, "cgroup.procs"), *map(Path, made.work_v1)]
        data = directory / "data"
        data.write_bytes(os.urandom(MIB) * (SIZE_MB // 2))
        descriptor = os.open(data, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORK, str(data), str(directory / "out")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=self._join,  # noqa: PLW1509 - no threads here
        )
        assert self.line() == "ready"

    def _join(self) -> None:
        for place in self._places:
            place.write_text("0")

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"check\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def kilobytes(self, name: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise LookupError(name)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


Reclaim = Callable[..., reclaiming.Reclaimed]


@pytest.fixture
def reclaim(aether: Path) -> Reclaim:
    """All of it, unless it is called off."""

    def take(
        layout: Layout, sandbox: str = SANDBOX, recall: Recall | None = None
    ) -> reclaiming.Reclaimed:
        force = partial(write_long, aether)
        return reclaiming.reclaim(layout, sandbox, recall or Recall(), force)

    return take


@pytest.fixture
def worker(layout: Layout, tmp_path: Path) -> Iterator[Worker]:
    made = Worker(layout, tmp_path)
    yield made
    made.end()


@pytest.fixture
def with_swap(tmp_path: Path) -> Iterator[str]:
    with swap(4 * SIZE_MB, tmp_path) as kind:
        yield kind


def test_what_is_frozen_does_nothing_until_it_is_thawed(layout: Layout, worker: Worker) -> None:
    freezing.freeze(layout, SANDBOX)
    assert freezing.frozen(layout, SANDBOX)
    worker.ask()  # some ten milliseconds of work, for which it has a processor and more time than that
    before = groups.usage(layout, SANDBOX).cpu_s
    hashlib.pbkdf2_hmac("sha256", b"work", b"of our own", 300_000)
    assert groups.usage(layout, SANDBOX).cpu_s == before
    freezing.freeze(layout, SANDBOX)
    freezing.thaw(layout, SANDBOX)
    assert worker.line() == "0"
    assert not freezing.frozen(layout, SANDBOX)
    freezing.thaw(layout, SANDBOX)


def test_what_is_frozen_can_be_killed(layout: Layout, worker: Worker) -> None:
    freezing.freeze(layout, SANDBOX)
    kill(layout)
    assert worker.process.wait(10) == -signal.SIGKILL


def test_one_that_is_not_there_cannot_be_frozen(layout: Layout, reclaim: Reclaim) -> None:
    for change in (freezing.freeze, freezing.thaw):
        with pytest.raises(FileNotFoundError):
            change(layout, "sbx2")
    assert reclaim(layout, "sbx2").before_bytes == 0
    assert refilling.refill(layout, "sbx2") == 0


def test_all_memory_is_given_back_and_nothing_of_it_lost(
    layout: Layout, worker: Worker, with_swap: str, reclaim: Reclaim
) -> None:
    freezing.freeze(layout, SANDBOX)
    taken = reclaim(layout)
    assert taken.before_bytes > (SIZE_MB + SIZE_MB // 2) * MIB
    assert taken.after_bytes < taken.before_bytes * 0.1, with_swap
    assert taken.swapped_bytes > SIZE_MB * MIB * 0.9
    assert taken.detail == ""
    assert worker.kilobytes("Swap") << 10 > SIZE_MB * MIB * 0.9
    reclaiming.restrain(layout, SANDBOX)
    freezing.thaw(layout, SANDBOX)
    worker.ask()
    assert worker.line() == "0"


def used(layout: Layout) -> int:
    return groups.usage(layout, SANDBOX).memory_bytes


def call_when_some_is_gone(layout: Layout, recall: Recall, over: threading.Event) -> None:
    before = used(layout)
    while used(layout) > before - 8 * MIB and not over.is_set():
        pass
    recall.call()


def test_it_stops_when_it_is_called_off(
    layout: Layout, worker: Worker, with_swap: str, reclaim: Reclaim
) -> None:
    for _ in range(50):  # what calls it off may come late; this host has other things to do
        recall, over = Recall(), threading.Event()
        freezing.freeze(layout, SANDBOX)
        caller = threading.Thread(target=call_when_some_is_gone, args=(layout, recall, over))
        caller.start()
        taken = reclaim(layout, recall=recall)
        over.set()
        caller.join()
        reclaiming.restrain(layout, SANDBOX)
        freezing.thaw(layout, SANDBOX)
        worker.ask()
        assert worker.line() == "0"
        if taken.after_bytes > taken.before_bytes * 0.1:
            assert "wanted again" in taken.detail
            return
    pytest.fail(f"all of it was taken each time ({with_swap})")


def test_what_went_to_swap_is_read_ahead(
    layout: Layout, worker: Worker, with_swap: str, reclaim: Reclaim
) -> None:
    freezing.freeze(layout, SANDBOX)
    reclaim(layout)
    reclaiming.restrain(layout, SANDBOX)
    advised = refilling.refill(layout, SANDBOX)
    assert advised >= SIZE_MB * MIB, with_swap
    assert groups.usage(layout, SANDBOX).memory_bytes > SIZE_MB * MIB // 2
    freezing.thaw(layout, SANDBOX)
    worker.ask()
    assert worker.line() == "0"


def test_a_running_sandbox_does_not_swap(
    layout: Layout, worker: Worker, with_swap: str, reclaim: Reclaim
) -> None:
    del with_swap
    freezing.freeze(layout, SANDBOX)
    reclaim(layout)
    reclaiming.restrain(layout, SANDBOX)
    freezing.thaw(layout, SANDBOX)
    worker.ask()
    assert worker.line() == "0"  # all of it has been touched and is back
    swapped = worker.kilobytes("Swap")
    tries = [directory / SANDBOX / "memory.force_empty" for directory in layout.v1_bases()]
    tries.append(layout.v2_base() / SANDBOX / "work/memory.reclaim")
    (force,) = (path for path in tries if path.exists())
    with contextlib.suppress(BlockingIOError):  # v2: it gave less than that
        force.write_text(str(SIZE_MB * MIB) if force.name == "memory.reclaim" else "0")
    assert worker.kilobytes("Swap") <= swapped


def test_the_end_of_a_process_between_two_looks_is_no_error(layout: Layout, worker: Worker) -> None:
    del layout
    with pidfd.opened(worker.process.pid) as descriptor:
        worker.end()
        assert descriptor is not None
        assert refilling._refill(worker.process.pid, mmap.PAGESIZE, iter(range(9))) == 0
