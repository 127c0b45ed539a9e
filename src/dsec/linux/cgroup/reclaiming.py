"""Taking memory back from a sandbox that stands still, and forbidding it swap when it goes on.

A running sandbox does not swap: what it has in swap would be outside its limit (v2) and slow for all.
A paused one may, into whatever swap the host has; without any, only memory backed by files goes.

v2: `memory.swap.max` is raised and `memory.reclaim` written until it gives no more. v1: swappiness
is raised from 0 and `memory.force_empty` written. The bound of memory and swap together stays: pages
only change sides under it. Of v1's ways it is the quickest and gives all: 300 MiB, two thirds of
them anonymous, went in 0.22 s, where lowering `memory.limit_in_bytes` took 0.30 s in steps and
0.57 s at once, and left a limit to be restored after a crash.

Either can be called off between steps; v1's one write is killed. Blocks; every call may be repeated.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsec.kit.recall import Recall
from dsec.linux import hostinfo
from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Layout

STEP_BYTES = 16 << 20
"""Written to a slow disk in some tenths of a second; who wants the sandbox waits for a step."""
SWAPPINESS = "100"
"""While paused: what is its own is no more worth keeping than what it has read."""
PATIENCE_S = 290.0
"""For all of it: gigabytes may have to go to a slow disk. What is left then stays, and is spoken of."""
WRITING_PATIENCE_S = 5.0
"""A slow disk may take longer to write all of it; what is left then stays, and is spoken of."""
LEFT_SHARE = 0.1
"""What stays of it beyond this share is spoken of."""


@dataclass(frozen=True, kw_only=True)
class Reclaimed:
    """What was taken."""

    before_bytes: int = 0
    """Resident."""
    after_bytes: int = 0
    swapped_bytes: int = 0
    """Of its own memory, in swap now."""
    detail: str = ""
    """What could not be taken and why, in words."""


Force = Callable[[Path, str, Recall, float], object]
"""Writes what keeps the kernel busy for long, until it is called off or its seconds are over."""


def reclaim(layout: Layout, sandbox: str, recall: Recall, force: Force) -> Reclaimed:
    """Take back all the memory of a frozen sandbox that the host lets go, or until it is called off."""
    if "memory" in layout.v2_controllers:
        return _reclaim_v2(layout.v2_base() / sandbox, recall, swap=layout.v2_swap)
    if directory := layout.v1.get("memory"):
        return _reclaim_v1(Path(directory) / layout.base / sandbox, recall, force)
    return Reclaimed(detail="no control group counts memory here: nothing was reclaimed")


def restrain(layout: Layout, sandbox: str) -> None:
    """Let a sandbox use no more swap than it does; what it has there comes back when it is touched."""
    if "memory" in layout.v2_controllers:
        _tell(layout.v2_base() / sandbox / "work" / "memory.swap.max", "0")
    elif directory := layout.v1.get("memory"):
        _tell(Path(directory) / layout.base / sandbox / "memory.swappiness", "0")


def _reclaim_v2(top: Path, recall: Recall, *, swap: bool) -> Reclaimed:
    before = files.number(top / "memory.current")
    if swap:
        _tell(top / "work" / "memory.swap.max", "max")
    deadline = time.monotonic() + PATIENCE_S
    while not recall.called and time.monotonic() < deadline:
        if not _gave(top, before) and not (_written(top, recall) and _gave(top, before)):
            break
    swapped = files.number(top / "memory.swap.current")
    return _report(before, files.number(top / "memory.current"), swapped, recall)


def _gave(top: Path, before: int) -> bool:
    """One step of `memory.reclaim`; whether there may be more."""
    step = min(STEP_BYTES, max(before, 1 << 20))
    held = files.number(top / "memory.current")
    if not held:
        return False
    with contextlib.suppress(BlockingIOError):  # EAGAIN: less than that
        files.write(top / "memory.reclaim", str(step))
        return True
    return held - files.number(top / "memory.current") > step // 16


def _written(top: Path, recall: Recall) -> bool:
    """Wait for what is on its way to swap, if anything is: a page is let go by a step after that."""
    deadline = time.monotonic() + WRITING_PATIENCE_S
    while files.keyed(top / "memory.stat").get("file_writeback", 0):
        if recall.called or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return files.keyed(top / "memory.stat").get("swapcached", 0) > 0


def _reclaim_v1(group: Path, recall: Recall, force: Force) -> Reclaimed:
    before = files.number(group / "memory.usage_in_bytes")
    _tell(group / "memory.swappiness", SWAPPINESS)
    if before and not recall.called:
        force(group / "memory.force_empty", "0", recall, PATIENCE_S)
    swapped = files.keyed(group / "memory.stat").get("swap", 0)
    return _report(before, files.number(group / "memory.usage_in_bytes"), swapped, recall)


def _report(before: int, after: int, swapped: int, recall: Recall) -> Reclaimed:
    return Reclaimed(
        before_bytes=before,
        after_bytes=after,
        swapped_bytes=swapped,
        detail=_why(after, recall) if after > before * LEFT_SHARE else "",
    )


def _why(left: int, recall: Recall) -> str:
    if recall.called:
        return f"it was wanted again before all was reclaimed: {left >> 20} MiB are left"
    memory = hostinfo.memory()
    if not memory.swap_total_bytes:
        return "the host has no swap: only memory backed by files was reclaimed"
    if memory.swap_free_bytes < left:
        return f"the host's swap has {memory.swap_free_bytes >> 20} MiB left"
    return f"{left >> 20} MiB are locked, or were in use by others"


def _tell(path: Path, text: str) -> None:
    """Write what makes a difference where it can be written, and is no reason to fail elsewhere."""
    try:
        files.write(path, text)
    except FileNotFoundError:
        return
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBUSY, errno.EAGAIN):
            raise
