"""memory (v2). No swap: what is swapped out would be outside the limit and slow for all."""

from __future__ import annotations

from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Bounds, Readings

METERS = ("memory.max", "memory.current", "memory.stat")
"""Files that tell limit, use, and of what."""


def writes(bounds: Bounds, *, swap: bool) -> files.Writes:
    """What to write. `memory.swap.max` is there where the kernel has swap support."""
    plain = [("memory.max", str(bounds.memory_bytes))]
    return [*plain, ("memory.swap.max", "0")] if swap else plain


def read(directory: Path, readings: Readings) -> None:
    """Fill in what this controller knows."""
    readings.memory_bytes = files.number(directory / "memory.current")
    readings.memory_peak_bytes = files.number(directory / "memory.peak")
    readings.memory_limit_bytes = files.number(directory / "memory.max")
    readings.oom_kills = oom_kills(directory)


def oom_kills(directory: Path) -> int:
    """Processes the limit has killed."""
    return files.keyed(directory / "memory.events").get("oom_kill", 0)
