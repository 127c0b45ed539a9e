"""cpu (v2). `cpu.stat` is there even where the controller is not."""

from __future__ import annotations

from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Bounds, Readings

PERIOD_US = 100_000
MIN_QUOTA_US = 1_000


def writes(bounds: Bounds) -> files.Writes:
    """What to write."""
    quota = max(MIN_QUOTA_US, round(bounds.cpu_cores * PERIOD_US))
    return [("cpu.max", f"{quota} {PERIOD_US}")]


def class_writes(bounds: Bounds, *, idle: bool) -> files.Writes:
    """What to write for its class: of its own where there is one (Linux 5.15), else the least weight."""
    if idle:
        return [("cpu.idle", "1" if bounds.best_effort else "0")]
    return [("cpu.weight", "1" if bounds.best_effort else "100")]


def read(directory: Path, readings: Readings) -> None:
    """Fill in the processor time of the group and all below it."""
    readings.cpu_s = files.keyed(directory / "cpu.stat").get("usage_usec", 0) / 1e6
