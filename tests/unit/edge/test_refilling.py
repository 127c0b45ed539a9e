"""Which mappings are read ahead, and how the host's swap is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.linux.cgroup import groups, refilling
from dsec.linux.cgroup.interface import Layout
from dsec.linux.cgroup.refilling import _bounded, swapped_ranges
from dsec.linux.hostinfo import Swap, parse_swaps
from dsec.linux.madvise import Range

SMAPS = b"""\
00400000-00402000 r-xp 00000000 00:1f 21                       /bin/busybox
Size:                  8 kB
Rss:                   0 kB
Swap:                  0 kB
SwapPss:               0 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000100000 rw-s 00000000 00:1f 22                       /tmp/\xff Swap: 1
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


def test_only_processes_with_something_in_swap_are_looked_at_and_all_lists_have_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [os.getppid(), os.getpid()]
    advised = []

    def will_need(_descriptor: int, ranges: list[Range]) -> None:
        advised.append(ranges)

    monkeypatch.setattr(refilling, "_PROC", tmp_path)
    monkeypatch.setattr(refilling, "will_need", will_need)
    monkeypatch.setattr(groups, "processes", lambda *_: pids)
    for pid in pids:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "smaps").write_bytes(SMAPS)
        (tmp_path / str(pid) / "smaps_rollup").write_bytes(rollup(swapped_kb=0))
    layout = Layout(base="x")
    assert refilling.refill(layout, "box") == 0
    (tmp_path / str(max(pids)) / "smaps_rollup").write_bytes(rollup(swapped_kb=4))
    assert refilling.refill(layout, "box") == (1 << 20) + 0x21000
    (tmp_path / str(min(pids)) / "smaps_rollup").write_bytes(rollup(swapped_kb=4))
    monkeypatch.setattr(refilling, "MAX_LINES", 23)
    advised.clear()
    refilling.refill(layout, "box")
    assert [len(ranges) for ranges in advised] == [2, 1]


def test_the_kernel_sums_up() -> None:
    assert refilling._is_swapped(os.getpid()) in (True, False)


def rollup(swapped_kb: int) -> bytes:
    return b"00400000-7fff0000 ---p 00000000 00:00 0   [rollup]\nSwap:  %d kB\n" % swapped_kb


def test_what_is_read_ahead_is_bounded() -> None:
    ranges = [Range(0, 4096), Range(1 << 20, 8192), Range(1 << 30, 4096)]
    assert _bounded(ranges, 8192) == [Range(0, 4096), Range(1 << 20, 4096)]
    assert _bounded(ranges, 0) == []


def test_the_hosts_swap_is_listed() -> None:
    text = "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0  partition\t1024\t16\t100\n"
    assert parse_swaps(text) == [Swap("/dev/zram0", 1 << 20, 16 << 10)]
    assert parse_swaps("Filename\tType\tSize\tUsed\tPriority\n") == []
