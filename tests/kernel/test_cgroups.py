"""Control groups of this kernel, whatever it has: v1, v2, or both side by side."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dsec.linux.cgroup import detect, files, groups
from dsec.linux.cgroup.interface import Bounds, Layout
from dsec.linux.cgroup.plan import CgroupPlan, directories, plan

pytestmark = pytest.mark.needs_root

BOUNDS = Bounds(memory_bytes=64 << 20, cpu_cores=0.5, pids=16)
PATIENCE_S = 30.0
TOUCH = (
    "data = bytearray({mib} << 20); data[::4096] = b'x' * len(data[::4096]); print(1, flush=True)"
)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


@dataclass
class Box:
    """The groups of one sandbox, made as the helper would, and processes in them."""

    layout: Layout
    name: str
    bounds: Bounds = BOUNDS
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan: CgroupPlan = plan(self.layout, self.name, self.bounds)
        for group in self.plan.directories:
            Path(group.path).mkdir()
            for name, text in group.writes:
                (Path(group.path) / name).write_text(text)

    def start(self, code: str, *, stdin: bool = False) -> subprocess.Popen[str]:
        """A Python that runs these lines, from its first moment in the groups of commands."""
        entries = [f"{self.plan.work_v2}/cgroup.procs"] if self.plan.work_v2 else []
        entries += self.plan.work_v1
        joined = "".join(f"open({entry!r}, 'w').write('0')\n" for entry in entries)
        argv = [sys.executable, "-S", "-c", f"import os, time\n{joined}{code}"]
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.children.append(child)
        return child

    def kill(self) -> None:
        """End all of it; asked again as the edge does, for init may be slow to bury orphans."""

        def dead() -> bool:
            with contextlib.suppress(TimeoutError):
                groups.kill(self.layout, self.name)
                return True
            return False

        eventually(dead)

    def remove(self) -> None:
        self.kill()
        for child in self.children:
            child.communicate()
        groups.remove(self.layout, self.name)


@pytest.fixture
def layout() -> Iterator[Layout]:
    """This host's layout, for a node of this test alone."""
    found = detect.detect(f"cg{os.urandom(4).hex()}")
    groups.prepare(found)
    yield found
    groups.retire(found)
    for directory in [*found.v1_bases(), *([found.v2_base()] if found.v2 else [])]:
        assert not directory.exists()


@pytest.fixture
def box(layout: Layout) -> Iterator[Box]:
    made = Box(layout, "box")
    yield made
    made.remove()
    assert groups.sandboxes(layout) == set()
    assert not any(path.exists() for path in directories(layout, "box"))


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def test_the_limits_are_in_the_kernel(box: Box) -> None:
    assert first_line(box.start("print(1, flush=True); time.sleep(60)"))
    usage = groups.usage(box.layout, box.name)
    assert usage.memory_limit_bytes == BOUNDS.memory_bytes
    assert usage.memory_bytes > 0
    assert usage.memory_peak_bytes >= usage.memory_bytes
    assert usage.pids == 1
    assert usage.cpu_s > 0


def test_memory_ends_at_the_limit(box: Box) -> None:
    child = box.start(TOUCH.format(mib=200))
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    assert groups.oom_kills(box.layout, box.name) == 1
    within = box.start(TOUCH.format(mib=16))
    assert first_line(within) == "1\n"
    assert groups.oom_kills(box.layout, box.name) == 1


def test_processes_end_at_the_limit(box: Box) -> None:
    code = """
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except BlockingIOError:
    print(made, flush=True)
time.sleep(60)
"""
    assert first_line(box.start(code)) == f"{BOUNDS.pids - 1}\n"
    assert groups.usage(box.layout, box.name).pids == BOUNDS.pids


def test_the_processor_is_shared_out(box: Box) -> None:
    """Half a processor: a quota's period ends with the group throttled."""
    box.start("while True: pass")
    places = [*map(Path, [box.plan.work_v2]), *(Path(p).parent for p in box.plan.work_v1)]

    def throttled() -> bool:
        return any(files.keyed(place / "cpu.stat").get("nr_throttled", 0) > 1 for place in places)

    eventually(throttled)


def test_killing_takes_all_that_was_forked(box: Box) -> None:
    code = "print(1, flush=True); [os.fork() for _ in range(3)]; time.sleep(60)"
    child = box.start(code)
    assert first_line(child) == "1\n"
    eventually(lambda: len(groups.processes(box.layout, box.name)) == 8)
    box.kill()
    assert groups.processes(box.layout, box.name) == set()
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


def test_preparing_twice_and_removing_twice_is_harmless(layout: Layout) -> None:
    groups.prepare(layout)
    box = Box(layout, "twice")
    assert groups.sandboxes(layout) == {"twice"}
    box.remove()
    groups.remove(layout, "twice")
    groups.kill(layout, "twice")
    assert groups.usage(layout, "twice").memory_bytes == 0


def test_groups_in_use_are_not_removed(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(layout, "busy")
    assert first_line(box.start("print(1, flush=True); time.sleep(60)"))
    monkeypatch.setattr(groups, "REMOVE_PATIENCE_S", 0.0)
    with pytest.raises(OSError, match="busy"):
        groups.remove(layout, "busy")
    monkeypatch.undo()
    with contextlib.suppress(FileNotFoundError):
        assert groups.processes(layout, "busy")
    box.remove()
