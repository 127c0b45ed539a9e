"""Reading ahead what the processes of a sandbox have in swap, once it goes on.

Only mappings of which a part is swapped out are advised on (MADV_WILLNEED): reading a program's files
whole because it has mapped them would bring in what nobody asked for. All of it is best effort and
bounded; whatever is left comes page by page when it is touched. Blocks; every call may be repeated.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsec.linux import pidfd
from dsec.linux.cgroup import groups
from dsec.linux.cgroup.interface import Layout
from dsec.linux.madvise import MAX_RANGES, Range, will_need

MAX_BYTES = 1 << 30
MAX_PROCESSES = 256
MAX_LINES = 500_000
"""Of one process's list, 25 lines to a mapping: it may have as many mappings as it likes."""


def refill(layout: Layout, sandbox: str) -> int:
    """Read ahead; how many bytes of mappings with something in swap were advised on."""
    left = MAX_BYTES
    for pid in itertools.islice(sorted(groups.processes(layout, sandbox)), MAX_PROCESSES):
        if left <= 0:
            break
        left -= _refill(pid, left)
    return MAX_BYTES - left


def _refill(pid: int, most: int) -> int:
    with pidfd.opened(pid) as descriptor, contextlib.suppress(OSError):
        if descriptor is None:
            return 0
        # Read after the descriptor was opened: if the number has gone to another process by then,
        # the advice goes to the old one, which is gone.
        with Path(f"/proc/{pid}/smaps").open() as lines:
            wanted = _bounded(swapped_ranges(itertools.islice(lines, MAX_LINES)), most)
        for batch in _batches(wanted):
            will_need(descriptor, batch)
        return sum(part.size_bytes for part in wanted)
    return 0


def swapped_ranges(smaps: Iterable[str]) -> Iterator[Range]:
    """The mappings of which something is in swap, from the lines of /proc/PID/smaps."""
    current = Range(0, 0)
    for line in smaps:
        name, _, rest = line.partition(" ")
        if name == "Swap:" and rest.split()[0] != "0":
            yield current
        elif not name.endswith(":"):
            start, _, end = name.partition("-")
            current = Range(int(start, 16), int(end, 16) - int(start, 16))


def _bounded(ranges: Iterable[Range], most: int) -> list[Range]:
    """The first of them that come to `most` bytes; the last one is cut."""
    taken: list[Range] = []
    for part in ranges:
        if most <= 0:
            break
        taken.append(Range(part.start, min(part.size_bytes, most)))
        most -= part.size_bytes
    return taken


def _batches(ranges: list[Range]) -> Iterator[list[Range]]:
    for at in range(0, len(ranges), MAX_RANGES):
        yield ranges[at : at + MAX_RANGES]
