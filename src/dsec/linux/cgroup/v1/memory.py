"""memory (v1). Swap is counted with memory where the kernel can, so that none is used."""

from __future__ import annotations

from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Bounds, Readings


def writes(bounds: Bounds, *, memsw: bool) -> files.Writes:
    """What to write; memsw after the limit, which may never be above it."""
    limit = str(bounds.memory_bytes)
    plain = [("memory.limit_in_bytes", limit)]
    return [*plain, ("memory.memsw.limit_in_bytes", limit)] if memsw else plain


def read(directory: Path, readings: Readings) -> None:
    """Fill in what this controller knows."""
    readings.memory_bytes = files.number(directory / "memory.usage_in_bytes")
    readings.memory_peak_bytes = files.number(directory / "memory.max_usage_in_bytes")
    readings.memory_limit_bytes = files.number(directory / "memory.limit_in_bytes")
    readings.oom_kills = oom_kills(directory)


def oom_kills(directory: Path) -> int:
    """Processes the limit has killed."""
    return files.keyed(directory / "memory.oom_control").get("oom_kill", 0)
