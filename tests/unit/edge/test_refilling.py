"""Which mappings are read ahead, and how the host's swap is read."""

from __future__ import annotations

from dsec.linux.cgroup.refilling import _bounded, swapped_ranges
from dsec.linux.hostinfo import Swap, parse_swaps
from dsec.linux.madvise import Range

SMAPS = """\
00400000-00402000 r-xp 00000000 00:1f 21                       /bin/busybox
Size:                  8 kB
Rss:                   0 kB
Swap:                  0 kB
SwapPss:               0 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
Rss:                   4 kB
Swap:               1020 kB
SwapPss:            1020 kB
7fff00000000-7fff00021000 rw-p 00000000 00:00 0                [stack: Swap: 4 kB]
Swap:                  4 kB
"""


def test_mappings_with_something_in_swap_are_found() -> None:
    assert list(swapped_ranges(SMAPS.splitlines(keepends=True))) == [
        Range(0x7F0000000000, 1 << 20),
        Range(0x7FFF00000000, 0x21000),
    ]


def test_what_is_read_ahead_is_bounded() -> None:
    ranges = [Range(0, 4096), Range(1 << 20, 8192), Range(1 << 30, 4096)]
    assert _bounded(ranges, 8192) == [Range(0, 4096), Range(1 << 20, 4096)]
    assert _bounded(ranges, 0) == []


def test_the_hosts_swap_is_listed() -> None:
    text = "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0  partition\t1024\t16\t100\n"
    assert parse_swaps(text) == [Swap("/dev/zram0", 1 << 20, 16 << 10)]
    assert parse_swaps("Filename\tType\tSize\tUsed\tPriority\n") == []
