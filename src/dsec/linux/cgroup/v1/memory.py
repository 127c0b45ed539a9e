"""memory (v1). Swap is counted with memory where the kernel can, so that none is used."""

from __future__ import annotations

from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Bounds, Readings

METERS = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
"""Files that tell limit, use, and of what."""


def writes(bounds: Bounds, *, memsw: bool) -> files.Writes:
    """What to write; memsw after the limit, which may never be above it.

    Equal limits keep a sandbox from swapping when it is at its own; the swappiness keeps the host
    from swapping it out when memory is short, where it has swap for those that are paused.
    """
    limit = str(bounds.memory_bytes)
    plain = [("memory.limit_in_bytes", limit)]
    no_swap = [("memory.memsw.limit_in_bytes", limit), ("memory.swappiness", "0")]
    return [*plain, *no_swap] if memsw else plain


def read(directory: Path, readings: Readings) -> None:
    """Fill in what this controller knows."""
    readings.memory_bytes = files.number(directory / "memory.usage_in_bytes")
    readings.memory_peak_bytes = files.number(directory / "memory.max_usage_in_bytes")
    readings.memory_limit_bytes = files.number(directory / "memory.limit_in_bytes")
    readings.oom_kills = oom_kills(directory)


def oom_kills(directory: Path) -> int:
    """Processes the limit has killed."""
    return files.keyed(directory / "memory.oom_control").get("oom_kill", 0)
