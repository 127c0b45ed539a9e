"""Reclaiming that is called off, on groups that are plain files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.kit.recall import Recall
from dsec.linux.cgroup import files, reclaiming
from dsec.linux.cgroup.interface import Layout

MIB = 1 << 20
SIZE = 1 << 30


class Group:
    """A v2 group that gives back what is asked for, and calls the reclaim off after so many steps."""

    def __init__(self, top: Path, recall: Recall, steps: int) -> None:
        self.given: list[int] = []
        self._current, self._recall, self._steps = top / "memory.current", recall, steps
        (top / "work").mkdir(parents=True)
        self._current.write_text(str(SIZE))
        for name in ("memory.reclaim", "work/memory.swap.max", "memory.swap.current"):
            (top / name).touch()

    def write(self, path: Path, text: str) -> None:
        if path.name != "memory.reclaim":
            return
        self.given.append(int(text))
        self._current.write_text(str(SIZE - sum(self.given)))
        if len(self.given) == self._steps:
            self._recall.call()


def _never(file: Path, text: str, recall: Recall, patience_s: float) -> None:
    raise AssertionError((file, text, recall, patience_s))


def _v2(base: Path) -> Layout:
    return Layout(base="", v2=str(base), v2_controllers=["memory"], v2_swap=True)


@pytest.mark.parametrize("steps", [1, 5])
def test_no_step_follows_once_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    recall = Recall()
    layout = _v2(tmp_path)
    group = Group(layout.v2_base() / "sbx", recall, steps)
    monkeypatch.setattr(files, "write", group.write)
    taken = reclaiming.reclaim(layout, "sbx", recall, _never)
    assert group.given == [reclaiming.STEP_BYTES] * steps
    assert taken.before_bytes - taken.after_bytes == steps * reclaiming.STEP_BYTES
    assert "wanted again" in taken.detail


def test_all_of_it_goes_if_nobody_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = _v2(tmp_path)
    group = Group(layout.v2_base() / "sbx", Recall(), 0)
    monkeypatch.setattr(files, "write", group.write)
    taken = reclaiming.reclaim(layout, "sbx", Recall(), _never)
    assert (sum(group.given), taken.after_bytes, taken.detail) == (SIZE, 0, "")


@pytest.mark.parametrize("called", [False, True])
def test_the_one_write_of_v1_is_not_begun_for_one_that_is_wanted(
    tmp_path: Path, called: bool
) -> None:
    group = tmp_path / "sbx"
    group.mkdir()
    (group / "memory.usage_in_bytes").write_text(str(SIZE))
    (group / "memory.swappiness").touch()
    forced: list[tuple[str, str]] = []
    recall = Recall()
    if called:
        recall.call()
    taken = reclaiming.reclaim(
        Layout(base="", v1={"memory": str(tmp_path)}),
        "sbx",
        recall,
        lambda file, text, _recall, _patience: forced.append((file.name, text)),
    )
    assert forced == [] if called else [("memory.force_empty", "0")]
    assert (taken.after_bytes, "wanted again" in taken.detail) == (SIZE, called)
