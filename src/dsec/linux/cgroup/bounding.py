"""Giving the groups of a sandbox that lives other bounds. Blocks; every call may be repeated.

Lowering memory first takes back what can be taken. Version 1 refuses a limit that is less than what
is left; version 2 would kill for it, so there it is looked at before.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from dsec.linux.cgroup import files, groups
from dsec.linux.cgroup.interface import Bounds, Layout
from dsec.linux.cgroup.plan import memory_group
from dsec.linux.cgroup.v1 import cpu as cpu1
from dsec.linux.cgroup.v1 import pids as pids1
from dsec.linux.cgroup.v2 import cpu as cpu2
from dsec.linux.cgroup.v2 import pids as pids2

PASSES = 20
"""Over all threads, until none is left that was started meanwhile with what it inherited."""


class InUse(Exception):
    """It uses more memory than it was to have."""

    def __init__(self, used_bytes: int) -> None:
        super().__init__(f"it uses {used_bytes} bytes")
        self.used_bytes = used_bytes


def bound(layout: Layout, sandbox: str, bounds: Bounds) -> None:
    """Give a sandbox these bounds, memory first: it alone can be refused.

    Raises:
        InUse: it uses more memory than that; nothing has changed.
        FileNotFoundError: it has no groups. OSError: naming the file.
    """
    _bound_memory(layout, sandbox, bounds.memory_bytes)
    if layout.v2_controllers:
        _write_all(layout.v2_base() / sandbox / "work", _of_v2(layout, bounds))
    for base, controllers in layout.v1_bases().items():
        _write_all(base / sandbox, _of_v1(layout, controllers, bounds))


def _of_v2(layout: Layout, bounds: Bounds) -> files.Writes:
    by_name = {
        "cpu": [*cpu2.writes(bounds), *cpu2.class_writes(bounds, idle=layout.idle)],
        "pids": pids2.writes(bounds),
    }
    return [line for name in layout.v2_controllers for line in by_name.get(name, [])]


def _of_v1(layout: Layout, controllers: list[str], bounds: Bounds) -> files.Writes:
    by_name = {
        "cpu": [*cpu1.writes(bounds), *cpu1.class_writes(bounds, idle=layout.idle)],
        "pids": pids1.writes(bounds),
    }
    return [line for name in controllers for line in by_name.get(name, [])]


def _bound_memory(layout: Layout, sandbox: str, limit: int) -> None:
    group = memory_group(layout, sandbox)
    if group is None:
        return
    if "memory" in layout.v2_controllers:
        _bound_v2(group, limit)
    else:
        _bound_v1(group, limit, memsw=layout.memsw)


def _bound_v2(group: Path, limit: int) -> None:
    if (used := _used_v2(group)) > limit:
        with contextlib.suppress(OSError):  # it gave less than that, or cannot (before 5.19)
            files.write(group / "memory.reclaim", str(used - limit))
        if (used := _used_v2(group)) > limit:
            raise InUse(used)
    files.write(group / "memory.max", str(limit))


def _used_v2(group: Path) -> int:
    # What a paused one has in swap must have room when it goes on.
    return files.number(group / "memory.current") + files.number(group / "memory.swap.current")


def _bound_v1(group: Path, limit: int, *, memsw: bool) -> None:
    plain, both = group / "memory.limit_in_bytes", group / "memory.memsw.limit_in_bytes"
    before = files.number(plain)
    # Memory may never be allowed more than memory and swap together.
    order = [plain, both] if limit < before else [both, plain]
    for path in order if memsw else [plain]:
        try:
            files.write(path, str(limit))
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
            if path == both:
                files.write(plain, str(before))
            raise InUse(_used_v1(group)) from exc


def _used_v1(group: Path) -> int:
    both = files.number(group / "memory.memsw.usage_in_bytes")
    return both or files.number(group / "memory.usage_in_bytes")


def _write_all(directory: Path, writes: files.Writes) -> None:
    for name, text in writes:
        files.write(directory / name, text)


def has_idle_class(layout: Layout) -> bool:
    """Whether groups of the cpu controller can be for idle times only; the node's own are there."""
    if "cpu" in layout.v2_controllers:
        return (layout.v2_base() / "cpu.idle").exists()
    directory = layout.v1.get("cpu")
    return bool(directory) and (Path(directory or "") / layout.base / "cpu.idle").exists()


def run_on(layout: Layout, sandbox: str, processors: frozenset[int]) -> None:
    """Have what a sandbox runs that is on more or fewer processors than these run on these.

    What is started from now on its aether puts on as many.

    Raises:
        OSError: EBUSY, it starts threads faster than they can be told.
    """
    for _ in range(PASSES):
        if not _told(groups.threads(layout, sandbox), processors):
            return
    raise OSError(errno.EBUSY, "sched_setaffinity: threads come too fast", sandbox)


def _told(threads: set[int], processors: frozenset[int]) -> bool:
    return sum(_tell(thread, processors) for thread in threads) > 0


def _tell(thread: int, processors: frozenset[int]) -> bool:
    """Whether it had to be told."""
    with contextlib.suppress(ProcessLookupError):
        if len(os.sched_getaffinity(thread)) != len(processors):
            os.sched_setaffinity(thread, processors)
            return True
    return False
