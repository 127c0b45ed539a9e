"""pids (v2)."""

from __future__ import annotations

from pathlib import Path

from dsec.linux.cgroup import files
from dsec.linux.cgroup.interface import Bounds, Readings


def writes(bounds: Bounds) -> files.Writes:
    """What to write."""
    return [("pids.max", str(bounds.pids))]


def read(directory: Path, readings: Readings) -> None:
    """Fill in what this controller knows."""
    readings.pids = files.number(directory / "pids.current")


def limit_hits(directory: Path) -> int:
    """Processes and threads the limit has kept from beginning."""
    return files.keyed(directory / "pids.events").get("max", 0)
