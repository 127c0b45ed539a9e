"""What only a host with one v2 hierarchy has. Runs in a guest."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dsec.linux.cgroup import files, groups
from dsec.linux.cgroup.interface import Layout
from tests.kernel.test_cgroups import TOUCH, Box, box, eventually, first_line, layout

__all__ = ["box", "layout"]
MIB = 1 << 20
CONTROLLERS = ["memory", "cpu", "pids"]


def work(box: Box) -> Path:
    return Path(box.plan.work_v2)


def test_one_hierarchy_has_everything(layout: Layout) -> None:
    assert (layout.v2, layout.v2_controllers, layout.v1) == ("/sys/fs/cgroup", CONTROLLERS, {})
    assert layout.v2_swap
    enabled = (layout.v2_base() / "cgroup.subtree_control").read_text().split()
    assert set(enabled) >= set(CONTROLLERS)


def test_the_limits_are_written_where_commands_run(box: Box) -> None:
    names = ("memory.max", "memory.swap.max", "cpu.max", "pids.max")
    assert {name: (work(box) / name).read_text().strip() for name in names} == {
        "memory.max": str(64 * MIB),
        "memory.swap.max": "0",
        "cpu.max": "50000 100000",
        "pids.max": "16",
    }
    agent = Path(box.plan.agent_v2)
    assert (agent / "memory.max").read_text().strip() == "max"


def test_nothing_of_a_running_one_is_swapped(box: Box) -> None:
    assert first_line(box.start(TOUCH.format(mib=40) + "\ntime.sleep(60)")) == "1\n"
    with pytest.raises(OSError) as refused:  # noqa: PT011 - the number below says which
        (work(box) / "memory.reclaim").write_text(str(40 * MIB))
    assert refused.value.errno == errno.EAGAIN
    assert files.number(work(box) / "memory.swap.current") == 0


def test_one_write_ends_all(box: Box) -> None:
    child = box.start("print(1, flush=True); [os.fork() for _ in range(3)]; time.sleep(60)")
    assert first_line(child) == "1\n"
    (box.layout.v2_base() / box.name / "cgroup.kill").write_text("1")
    eventually(lambda: not groups.processes(box.layout, box.name))
