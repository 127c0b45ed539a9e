"""Which processors of the host a sandbox runs on."""

from __future__ import annotations

import math
import os


def usable() -> list[int]:
    """Those that this process may use, by number."""
    return sorted(os.sched_getaffinity(0))


def choose(processors: list[int], cores: float, turn: int) -> list[int]:
    """As many as `cores` asks for, rounded up; all, if it asks for as many or more. Pure.

    Args:
        processors: to choose from.
        cores: the share of processor time that is allowed.
        turn: a number of the sandbox's own; those that follow each other are spread evenly.
    """
    count = math.ceil(cores)
    if count >= len(processors):
        return processors
    first = turn * count
    return sorted(processors[(first + step) % len(processors)] for step in range(count))
