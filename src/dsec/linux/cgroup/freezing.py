"""Stopping all processes of a sandbox where they stand, and letting them go on.

Always by the v2 hierarchy, also where it has no controllers beside v1's: `cgroup.freeze` belongs to
the hierarchy itself, and no sandbox is made on a host without one. So there is no group of v1's
freezer to keep, whose frozen processes could not even be killed before they are thawed; here SIGKILL
and `cgroup.kill` end what is frozen.

What the sandbox runs is stopped first and its aether after it: a command may wait for an answer of
aether's in the kernel, and does not stand still before it has it. Blocks; every call may be repeated.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Layout

PATIENCE_S = 5.0
"""A process that waits in the kernel for a slow disk stands still when that wait is over."""


def freeze(layout: Layout, sandbox: str) -> None:
    """Stop a sandbox; on return none of its processes runs.

    Raises:
        FileNotFoundError: it has no groups. TimeoutError: some of it does not stand still.
    """
    deadline = time.monotonic() + PATIENCE_S
    for part in ("work", "agent"):
        group = layout.v2_base() / sandbox / part
        files.write(group / "cgroup.freeze", "1")
        if not _wait_frozen(group, deadline):
            raise TimeoutError(f"processes of {sandbox} did not stand still in {PATIENCE_S:.0f} s")


def thaw(layout: Layout, sandbox: str) -> None:
    """Let a sandbox go on.

    Raises:
        FileNotFoundError: it has no groups.
    """
    for part in ("agent", "work"):
        files.write(layout.v2_base() / sandbox / part / "cgroup.freeze", "0")


def frozen(layout: Layout, sandbox: str) -> bool:
    """Whether all of a sandbox stands still."""
    top = layout.v2_base() / sandbox
    return all(_frozen(files.read(top / part / "cgroup.events")) for part in ("work", "agent"))


def _frozen(events: str) -> bool:
    return "frozen 1" in events


def _wait_frozen(group: Path, deadline: float) -> bool:
    """Wait for the kernel's word, which it gives by POLLPRI."""
    with (group / "cgroup.events").open("rb", buffering=0) as events:
        poller = select.poll()
        poller.register(events, select.POLLPRI)
        while not _frozen(os.pread(events.fileno(), 4096, 0).decode()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poller.poll(left * 1000)
    return True
