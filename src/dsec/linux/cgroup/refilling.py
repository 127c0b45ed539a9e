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
MAX_LINES = 250_000
"""Of all lists together, 25 lines to a mapping: processes may have as many mappings as they like."""
_PROC = Path("/proc")


def refill(layout: Layout, sandbox: str) -> int:
    """Read ahead; how many bytes of mappings with something in swap were advised on."""
    left, lines = MAX_BYTES, iter(range(MAX_LINES))
    for pid in itertools.islice(sorted(groups.processes(layout, sandbox)), MAX_PROCESSES):
        if left <= 0:
            break
        left -= _refill(pid, left, lines)
    return MAX_BYTES - left


def _refill(pid: int, most: int, budget: Iterator[int]) -> int:
    with pidfd.opened(pid) as descriptor, contextlib.suppress(OSError):
        if descriptor is None or not _is_swapped(pid):
            return 0
        # Read after the descriptor was opened: if the number has gone to another process by then,
        # the advice goes to the old one, which is gone.
        with (_PROC / str(pid) / "smaps").open("rb") as file:
            lines = (line for _, line in zip(budget, file, strict=False))
            wanted = _bounded(swapped_ranges(lines), most)
        for batch in _batches(wanted):
            will_need(descriptor, batch)
        return sum(part.size_bytes for part in wanted)
    return 0


def _is_swapped(pid: int) -> bool:
    """Whether anything of a process is in swap: some twenty lines, which the kernel sums up."""
    with (_PROC / str(pid) / "smaps_rollup").open("rb") as lines:
        return next(swapped_ranges(lines), None) is not None


def swapped_ranges(smaps: Iterable[bytes]) -> Iterator[Range]:
    """The mappings of which something is in swap, from the lines of /proc/PID/smaps.

    The names of files in it are whatever their makers like, but for newlines, which are escaped.
    """
    current = Range(0, 0)
    for line in smaps:
        name, _, rest = line.partition(b" ")
        if name == b"Swap:" and rest.split()[0] != b"0":
            yield current
        elif not name.endswith(b":"):
            start, _, end = name.partition(b"-")
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
