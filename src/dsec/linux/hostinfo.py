"""What the host is: memory, processors, kernel. Reads /proc; no caching."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Memory:
    """The host's memory in bytes."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int


def memory() -> Memory:
    """Read /proc/meminfo."""
    return parse_meminfo(_MEMINFO.read_text())


def parse_meminfo(text: str) -> Memory:
    """Pick the three numbers out of the text of /proc/meminfo."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    available = values.get("MemAvailable", values.get("MemFree", 0))
    return Memory(values["MemTotal"], available, values.get("SwapTotal", 0))


def cpus() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))


def kernel_release() -> str:
    """As `uname -r` says."""
    return platform.release()
