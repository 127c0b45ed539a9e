"""Other bounds for groups that live: what is written, in which order, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.linux.cgroup import bounding
from dsec.linux.cgroup.interface import Bounds, Layout
from dsec.linux.processors import choose

MIB = 1 << 20
BOUNDS = Bounds(memory_bytes=64 * MIB, cpu_cores=0.5, pids=20, best_effort=True)


def files(directory: Path, **texts: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name.replace("__", ".")).write_text(text)


def unified(root: Path, *, used: int = 0, swapped: int = 0) -> Layout:
    """A sandbox `s` under version 2, with plain files for the kernel's."""
    files(
        root / "dsec-n/s/work",
        memory__max="max",
        memory__current=str(used),
        memory__swap__current=str(swapped),
        memory__reclaim="",
        cpu__max="",
        cpu__idle="",
        pids__max="",
    )
    controllers = ["memory", "cpu", "pids"]
    return Layout(base="dsec-n", v2=str(root), v2_controllers=controllers, idle=True)


def test_all_bounds_of_version_2_are_written(tmp_path: Path) -> None:
    bounding.bound(unified(tmp_path, used=MIB), "s", BOUNDS)
    work = tmp_path / "dsec-n/s/work"
    got = {path.name: path.read_text() for path in work.iterdir()}
    assert got["memory.max"] == str(64 * MIB)
    assert got["cpu.max"] == "50000 100000"
    assert (got["cpu.idle"], got["pids.max"], got["memory.reclaim"]) == ("1", "20", "")


@pytest.mark.parametrize(("used", "swapped"), [(80, 0), (30, 50)])
def test_version_2_is_asked_before_it_would_kill(tmp_path: Path, used: int, swapped: int) -> None:
    layout = unified(tmp_path, used=used * MIB, swapped=swapped * MIB)
    with pytest.raises(bounding.InUse) as caught:
        bounding.bound(layout, "s", BOUNDS)
    assert caught.value.used_bytes == 80 * MIB
    work = tmp_path / "dsec-n/s/work"
    assert (work / "memory.reclaim").read_text() == str(16 * MIB)
    assert ((work / "memory.max").read_text(), (work / "pids.max").read_text()) == ("max", "")


@pytest.mark.parametrize(("now", "last"), [(32, "limit_in_bytes"), (128, "memsw.limit_in_bytes")])
def test_version_1_never_has_memory_above_memory_and_swap(
    tmp_path: Path, now: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"memory__limit_in_bytes": str(now * MIB), "memory__memsw__limit_in_bytes": ""}
    files(tmp_path / "dsec-n/s", **names)
    written: list[str] = []
    monkeypatch.setattr(
        "dsec.linux.cgroup.files.write", lambda path, _text: written.append(path.name)
    )
    layout = Layout(base="dsec-n", v1={"memory": str(tmp_path)}, memsw=True)
    bounding.bound(layout, "s", BOUNDS)
    assert len(written) == 2
    assert written[-1] == f"memory.{last}"


def test_without_a_class_of_its_own_it_gets_the_least_weight(tmp_path: Path) -> None:
    files(tmp_path / "dsec-n/s", cpu__cfs_period_us="", cpu__cfs_quota_us="", cpu__shares="")
    layout = Layout(base="dsec-n", v1={"cpu": str(tmp_path)})
    bounding.bound(layout, "s", BOUNDS)
    assert (tmp_path / "dsec-n/s/cpu.shares").read_text() == "2"


def test_a_group_that_is_gone_is_not_made_of_files(tmp_path: Path) -> None:
    layout = unified(tmp_path)
    with pytest.raises(FileNotFoundError):
        bounding.bound(layout, "other", BOUNDS)
    assert not (tmp_path / "dsec-n/other").exists()


def test_threads_run_where_they_are_told(tmp_path: Path) -> None:
    layout = unified(tmp_path)
    before = os.sched_getaffinity(0)
    thread, gone = os.getpid(), 2**22 + 1  # the second is beyond what the kernel gives
    (tmp_path / "dsec-n/s" / "work" / "cgroup.threads").write_text(f"{thread}\n{gone}\n")
    try:
        bounding.run_on(layout, "s", frozenset({min(before)}))
        assert len(os.sched_getaffinity(thread)) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_processors_are_spread_evenly() -> None:
    eight = list(range(8))
    for cores, each in ((0.1, 1), (1, 1), (2, 2), (3, 3), (5, 5)):
        chosen = [choose(eight, cores, turn) for turn in range(80)]
        assert {len(one) for one in chosen} == {each}
        loads = {cpu: sum(cpu in one for one in chosen) for cpu in eight}
        assert set(loads.values()) == {80 * each // 8}, cores
    assert choose(eight, 7.5, 3) == choose(eight, 64, 3) == eight
