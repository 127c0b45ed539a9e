"""cpu and cpuacct (v1)."""

from __future__ import annotations

from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Bounds, Readings

PERIOD_US = 100_000
MIN_QUOTA_US = 1_000


def writes(bounds: Bounds) -> files.Writes:
    """What to write; the period first, the quota is checked against it."""
    quota = max(MIN_QUOTA_US, round(bounds.cpu_cores * PERIOD_US))
    return [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]


def class_writes(bounds: Bounds, *, idle: bool) -> files.Writes:
    """What to write for its class: of its own where there is one (Linux 5.15), else the least weight."""
    if idle:
        return [("cpu.idle", "1" if bounds.best_effort else "0")]
    return [("cpu.shares", "2" if bounds.best_effort else "1024")]


def read(directory: Path, readings: Readings) -> None:
    """Fill in what cpuacct knows."""
    readings.cpu_s = files.number(directory / "cpuacct.usage") / 1e9
