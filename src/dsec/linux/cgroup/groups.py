"""Making, reading, killing and removing groups. Blocks; every call may be repeated."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Layout, Readings
from dsec.linux.cgroup.plan import directories
from dsec.linux.cgroup.v1 import cpu as cpu1
from dsec.linux.cgroup.v1 import memory as memory1
from dsec.linux.cgroup.v1 import pids as pids1
from dsec.linux.cgroup.v2 import cpu as cpu2
from dsec.linux.cgroup.v2 import memory as memory2
from dsec.linux.cgroup.v2 import pids as pids2

KILL_PATIENCE_S = 0.05
"""Most end at once. Who waits longer should not do it in a thread that others need."""
REMOVE_PATIENCE_S = 5.0


def prepare(layout: Layout) -> None:
    """Make the node's own directories and hand the controllers down to them.

    Raises:
        OSError: it cannot; the file is named.
    """
    for base in layout.v1_bases():
        base.mkdir(parents=True, exist_ok=True)
    if layout.v2:
        base = layout.v2_base()
        base.mkdir(parents=True, exist_ok=True)
        if layout.v2_controllers:
            enable = " ".join(f"+{name}" for name in layout.v2_controllers)
            for directory in _down_to(base):
                _enable(directory, enable)


def _down_to(base: Path) -> list[Path]:
    """From the top of base's hierarchy to base itself."""
    chain = [base]
    while (chain[-1].parent / "cgroup.subtree_control").exists():
        chain.append(chain[-1].parent)
    return chain[::-1]


def _enable(directory: Path, controllers: str) -> None:
    control = directory / "cgroup.subtree_control"
    try:
        control.write_text(controllers)
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        # Processes may only be in leaves: they move to a leaf of their own (so in a container,
        # where the visible top is not the real one).
        leaf = directory / "dsec-moved"
        leaf.mkdir(exist_ok=True)
        for pid in files.read(directory / "cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)
        control.write_text(controllers)


def usage(layout: Layout, sandbox: str) -> Readings:
    """What a sandbox uses; zeros once it is gone."""
    readings = Readings()
    if layout.v2:
        top = layout.v2_base() / sandbox
        cpu2.read(top, readings)
        if "memory" in layout.v2_controllers:
            memory2.read(top / "work", readings)
        if "pids" in layout.v2_controllers:
            pids2.read(top / "work", readings)
    for base, controllers in layout.v1_bases().items():
        if "memory" in controllers:
            memory1.read(base / sandbox, readings)
        if "pids" in controllers:
            pids1.read(base / sandbox, readings)
        if "cpuacct" in controllers:
            cpu1.read(base / sandbox, readings)
    return readings


def oom_kills(layout: Layout, sandbox: str) -> int:
    """Processes a sandbox's memory limit has killed; does not block."""
    if "memory" in layout.v2_controllers:
        return memory2.oom_kills(layout.v2_base() / sandbox / "work")
    if directory := layout.v1.get("memory"):
        return memory1.oom_kills(Path(directory) / layout.base / sandbox)
    return 0


def pids_limit_hits(layout: Layout, sandbox: str) -> int:
    """Processes and threads a sandbox's limit has kept from beginning."""
    if "pids" in layout.v2_controllers:
        return pids2.limit_hits(layout.v2_base() / sandbox / "work")
    if directory := layout.v1.get("pids"):
        return pids1.limit_hits(Path(directory) / layout.base / sandbox)
    return 0


def kill(layout: Layout, sandbox: str) -> None:
    """End every process in a sandbox's groups and wait until they are gone.

    Raises:
        TimeoutError: some did not end; they are named.
    """
    top = layout.v2_base() / sandbox
    deadline = time.monotonic() + KILL_PATIENCE_S
    pause = 0.0005
    while True:
        if layout.v2:
            with contextlib.suppress(OSError):
                (top / "cgroup.kill").write_text("1")
        left = processes(layout, sandbox)
        if not left and not _populated(top):
            return
        if not layout.v2:
            _kill_each(left)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(left)} of {sandbox} did not end")
        time.sleep(pause)
        pause = min(0.05, pause * 2)


def _populated(top: Path) -> bool:
    return files.keyed(top / "cgroup.events").get("populated", 0) == 1


def _kill_each(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(layout: Layout, sandbox: str) -> set[int]:
    """Processes in a sandbox's groups, those of commands included."""
    return _members(directories(layout, sandbox), "cgroup.procs")


def threads(layout: Layout, sandbox: str) -> set[int]:
    """Threads of what a sandbox runs, its aether aside."""
    return _members([layout.v2_base() / sandbox / "work"], "cgroup.threads")


def _members(directories: list[Path], file: str) -> set[int]:
    ids: set[int] = set()
    for directory in directories:
        for part, _, _ in os.walk(directory):
            ids |= {int(number) for number in files.read(Path(part, file)).split()}
    return ids - {0}


def remove(layout: Layout, sandbox: str) -> None:
    """Remove a sandbox's groups and all below them; processes must have ended.

    Raises:
        OSError: one is still in use.
    """
    for directory in directories(layout, sandbox):
        for part, _, _ in os.walk(directory, topdown=False):
            _rmdir(Path(part))


def _rmdir(directory: Path) -> None:
    # A group stays busy for a moment after its last process was reaped.
    deadline = time.monotonic() + REMOVE_PATIENCE_S
    pause = 0.0005
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(pause)
            pause = min(0.05, pause * 2)
        else:
            return


def sandboxes(layout: Layout) -> set[str]:
    """Names of all sandboxes that have a group."""
    bases = [*layout.v1_bases(), *([layout.v2_base()] if layout.v2 else [])]
    return {
        entry.name for base in bases if base.is_dir() for entry in base.iterdir() if entry.is_dir()
    }


def retire(layout: Layout) -> None:
    """Remove the node's own directories if nothing is in them any more."""
    for base in [*layout.v1_bases(), *([layout.v2_base()] if layout.v2 else [])]:
        with contextlib.suppress(OSError):
            base.rmdir()
