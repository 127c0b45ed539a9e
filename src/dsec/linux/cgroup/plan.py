"""What one sandbox gets: directories to make and what to write into them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Bounds, Layout
from dsec.linux.cgroup.v1 import cpu as cpu1
from dsec.linux.cgroup.v1 import memory as memory1
from dsec.linux.cgroup.v1 import pids as pids1
from dsec.linux.cgroup.v2 import cpu as cpu2
from dsec.linux.cgroup.v2 import memory as memory2
from dsec.linux.cgroup.v2 import pids as pids2
from dsec.wire.launch import CgroupDir, Meters


class ClassWrites(Protocol):
    """What a version writes for a class."""

    def __call__(self, bounds: Bounds, *, idle: bool) -> files.Writes:
        """The lines."""
        ...


@dataclass(frozen=True, kw_only=True)
class CgroupPlan:
    """The parts of a LaunchSpec that are about control groups."""

    directories: list[CgroupDir]
    agent_v2: str
    work_v2: str
    work_v1: list[str]
    meters: Meters | None
    """None where memory or time is not limited, or time not counted."""


def plan(layout: Layout, sandbox: str, bounds: Bounds) -> CgroupPlan:
    """Plan the groups of one sandbox, parents first."""
    v1 = [
        CgroupDir(path=str(base / sandbox), writes=_writes_v1(controllers, layout, bounds))
        for base, controllers in layout.v1_bases().items()
    ]
    v2 = _v2(layout, sandbox, bounds) if layout.v2 else []
    return CgroupPlan(
        directories=[*v2, *v1],
        agent_v2=v2[1].path if v2 else "",
        work_v2=v2[2].path if v2 else "",
        work_v1=[f"{group.path}/tasks" for group in v1],
        meters=_meters(layout, sandbox),
    )


def _v2(layout: Layout, sandbox: str, bounds: Bounds) -> list[CgroupDir]:
    # aether moves processes from `agent` to children of `work`: the kernel asks for the right to
    # write in their common ancestor too, so the sandbox's own directory is delegated as well.
    top = layout.v2_base() / sandbox
    enable = " ".join(f"+{name}" for name in layout.v2_controllers)
    spread = [("cgroup.subtree_control", enable)] if enable else []
    return [
        CgroupDir(path=str(top), writes=spread, delegate=True),
        CgroupDir(path=str(top / "agent"), delegate=True),
        CgroupDir(path=str(top / "work"), writes=_writes_v2(layout, bounds), delegate=True),
    ]


def _writes_v2(layout: Layout, bounds: Bounds) -> files.Writes:
    by_name = {
        "memory": memory2.writes(bounds, swap=layout.v2_swap),
        "cpu": [*cpu2.writes(bounds), *_class(cpu2.class_writes, layout, bounds)],
        "pids": pids2.writes(bounds),
    }
    return [line for name in layout.v2_controllers for line in by_name[name]]


def _writes_v1(controllers: list[str], layout: Layout, bounds: Bounds) -> files.Writes:
    by_name = {
        "memory": memory1.writes(bounds, memsw=layout.memsw),
        "cpu": [*cpu1.writes(bounds), *_class(cpu1.class_writes, layout, bounds)],
        "pids": pids1.writes(bounds),
    }
    return [line for name in controllers for line in by_name.get(name, [])]


def _class(writes: ClassWrites, layout: Layout, bounds: Bounds) -> files.Writes:
    # What a new group is without a word is not written: it would cost every creation.
    return writes(bounds, idle=layout.idle) if bounds.best_effort else []


def _meters(layout: Layout, sandbox: str) -> Meters | None:
    memory, v2 = memory_group(layout, sandbox), layout.v2_base() / sandbox
    time = v2 / "cpu.stat" if layout.v2 else _of_v1(layout, sandbox, "cpuacct", "cpuacct.stat")
    in_v2 = "cpu" in layout.v2_controllers
    share = v2 / "work/cpu.max" if in_v2 else _of_v1(layout, sandbox, "cpu", "cpu.cfs_quota_us")
    if memory is None or time is None or share is None:
        return None
    names = memory2.METERS if "memory" in layout.v2_controllers else memory1.METERS
    limit, usage, stat = (str(memory / name) for name in names)
    return Meters(
        memory_limit=limit,
        memory_usage=usage,
        memory_stat=stat,
        cpu_time=str(time),
        cpu_limit=str(share),
    )


def _of_v1(layout: Layout, sandbox: str, controller: str, name: str) -> Path | None:
    directory = layout.v1.get(controller)
    return Path(directory) / layout.base / sandbox / name if directory else None


def memory_group(layout: Layout, sandbox: str) -> Path | None:
    """The directory whose memory is a sandbox's; None where none is limited."""
    if "memory" in layout.v2_controllers:
        return layout.v2_base() / sandbox / "work"
    directory = layout.v1.get("memory")
    return Path(directory) / layout.base / sandbox if directory else None


def directories(layout: Layout, sandbox: str) -> list[Path]:
    """Every directory a sandbox may have, children first."""
    v2 = layout.v2_base() / sandbox
    of_v2 = [v2 / "work", v2 / "agent", v2] if layout.v2 else []
    return [*of_v2, *(base / sandbox for base in layout.v1_bases())]
