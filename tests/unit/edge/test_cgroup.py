from __future__ import annotations

from pathlib import Path

import pytest

from dsec.linux.cgroup import files
from dsec.linux.cgroup.detect import layout, parse_mounts
from dsec.linux.cgroup.interface import Bounds, Layout
from dsec.linux.cgroup.plan import directories, plan

HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
JOINED = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
BOUNDS = Bounds(memory_bytes=64 << 20, cpu_cores=0.5, pids=20)
ROOT = "/sys/fs/cgroup"


def hybrid(parent: str = "") -> Layout:
    mounts = parse_mounts(HYBRID)
    return layout("n001", mounts, {f"{ROOT}/unified": ""}, memsw=True, parent=parent)


def unified() -> Layout:
    return layout("n001", parse_mounts(UNIFIED), {ROOT: "cpuset cpu io memory pids"}, memsw=True)


def test_a_hybrid_host_limits_by_v1_and_kills_by_v2() -> None:
    got = plan(hybrid(), "sbx1", BOUNDS)
    assert [(group.path, group.writes, group.delegate) for group in got.directories] == [
        (f"{ROOT}/unified/dsec-n001/sbx1", [], True),
        (f"{ROOT}/unified/dsec-n001/sbx1/agent", [], True),
        (f"{ROOT}/unified/dsec-n001/sbx1/work", [], True),
        (
            f"{ROOT}/cpu/dsec-n001/sbx1",
            [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "50000")],
            False,
        ),
        (
            f"{ROOT}/memory/dsec-n001/sbx1",
            [
                ("memory.limit_in_bytes", "67108864"),
                ("memory.memsw.limit_in_bytes", "67108864"),
                ("memory.swappiness", "0"),
            ],
            False,
        ),
        (f"{ROOT}/pids/dsec-n001/sbx1", [("pids.max", "20")], False),
    ]
    assert got.agent_v2.endswith("sbx1/agent")
    assert got.work_v2.endswith("sbx1/work")
    assert got.work_v1 == [f"{ROOT}/{c}/dsec-n001/sbx1/tasks" for c in ("cpu", "memory", "pids")]


def test_a_unified_host_limits_the_work_and_not_the_agent() -> None:
    got = plan(unified(), "sbx1", BOUNDS)
    assert [(group.path, group.writes) for group in got.directories] == [
        (f"{ROOT}/dsec-n001/sbx1", [("cgroup.subtree_control", "+memory +cpu +pids")]),
        (f"{ROOT}/dsec-n001/sbx1/agent", []),
        (
            f"{ROOT}/dsec-n001/sbx1/work",
            [
                ("memory.max", "67108864"),
                ("memory.swap.max", "0"),
                ("cpu.max", "50000 100000"),
                ("pids.max", "20"),
            ],
        ),
    ]
    assert got.work_v1 == []


def test_controllers_mounted_together_are_one_group() -> None:
    got = layout("n001", parse_mounts(JOINED), {})
    assert got.v2 == ""
    groups = plan(got, "sbx1", BOUNDS).directories
    assert [group.path for group in groups] == [f"{ROOT}/cpu,cpuacct/dsec-n001/sbx1"]


def test_a_parent_is_put_before_all() -> None:
    assert hybrid("/machines/x/").v1["memory"] == f"{ROOT}/memory/machines/x"
    assert str(hybrid("machines").v2_base()) == f"{ROOT}/unified/machines/dsec-n001"


def test_children_come_before_parents_in_removal() -> None:
    assert [str(path) for path in directories(unified(), "s")] == [
        f"{ROOT}/dsec-n001/s/work",
        f"{ROOT}/dsec-n001/s/agent",
        f"{ROOT}/dsec-n001/s",
    ]


def test_a_tiny_share_is_the_least_the_kernel_takes() -> None:
    tiny = Bounds(memory_bytes=1 << 24, cpu_cores=0.0001, pids=8)
    assert ("cpu.max", "1000 100000") in plan(unified(), "s", tiny).directories[2].writes


@pytest.mark.parametrize(
    ("text", "number"), [("12\n", 12), ("max\n", 0), ("", 0), ("-1\n", 0), ("nonsense", 0)]
)
def test_small_files(tmp_path: Path, text: str, number: int) -> None:
    (tmp_path / "f").write_text(text)
    assert files.number(tmp_path / "f") == number
    assert files.number(tmp_path / "absent") == 0


def test_keyed_files(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("oom 1\noom_kill 3\nodd\nbad x\n")
    assert files.keyed(tmp_path / "f") == {"oom": 1, "oom_kill": 3}
