"""What the host is: memory, processors, kernel. Reads /proc; no caching."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_SWAPS = Path("/proc/swaps")


@dataclass(frozen=True)
class Memory:
    """The host's memory in bytes."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int = 0


def memory() -> Memory:
    """Read /proc/meminfo."""
    return parse_meminfo(_MEMINFO.read_text())


def parse_meminfo(text: str) -> Memory:
    """Pick the numbers out of the text of /proc/meminfo."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    available = values.get("MemAvailable", values.get("MemFree", 0))
    return Memory(
        values["MemTotal"], available, values.get("SwapTotal", 0), values.get("SwapFree", 0)
    )


@dataclass(frozen=True)
class Swap:
    """One area of the host's swap."""

    path: str
    size_bytes: int
    used_bytes: int


def swaps() -> list[Swap]:
    """The areas in use, as the kernel lists them."""
    return parse_swaps(_SWAPS.read_text()) if _SWAPS.exists() else []


def parse_swaps(text: str) -> list[Swap]:
    """Read the text of /proc/swaps: a heading, then path, type, kilobytes, kilobytes, priority."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return [Swap(row[0], int(row[2]) << 10, int(row[3]) << 10) for row in rows if len(row) >= 4]


def cpus() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))


def kernel_release() -> str:
    """As `uname -r` says."""
    return platform.release()
