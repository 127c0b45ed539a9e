"""What had happened before snapshots: kept with them, gone with them, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.base.errors import StorageFull
from dsec.edge import histories
from dsec.edge.histories import Histories
from dsec.edge.images import SnapshotFacts
from dsec.trajectory import writer
from dsec.trajectory.format import Begun, Ended

BOX, STEP = "sbxn0de234567", 1


@pytest.fixture
def trajectory(tmp_path: Path) -> Path:
    path = tmp_path / "trajectory"
    writer.create(path, [Begun(1, 1.0, "create"), Ended(1, 2.0, "ok")])
    return path


@pytest.fixture
def size(trajectory: Path, tmp_path: Path) -> int:
    """Of one history."""
    histories.copy_history(trajectory, STEP, tmp_path / "one")
    return (tmp_path / "one").stat().st_size


@pytest.fixture
def node(tmp_path: Path) -> Histories:
    return restarted(tmp_path)


def restarted(tmp_path: Path) -> Histories:
    node = Histories(tmp_path)
    node.prepare()
    return node


def kept(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "histories").rglob("*") if path.is_file())


def test_all_together_are_bounded(
    node: Histories, trajectory: Path, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MAX_BYTES", 3 * size)
    for project in ("a", "b", "c"):
        assert node.keep(trajectory, project, "snap", BOX, STEP)
    for other in (node, restarted(tmp_path)):
        with pytest.raises(StorageFull, match="of all projects"):
            other.keep(trajectory, "d", "snap", BOX, STEP)
        assert len(kept(tmp_path)) == 3
        assert not other.keep(trajectory, "a", "snap", BOX, STEP)


@pytest.mark.parametrize("project", ["a", "a/b", "..", "ä b"])
def test_one_project_leaves_room_for_others(
    node: Histories,
    trajectory: Path,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    project: str,
) -> None:
    monkeypatch.setattr(histories, "MAX_PROJECT_BYTES", 2 * size)
    for name in ("first", "second"):
        assert node.keep(trajectory, project, name, BOX, STEP)
    for other in (node, restarted(tmp_path)):
        with pytest.raises(StorageFull, match="of project"):
            other.keep(trajectory, project, "third", BOX, STEP)
    assert node.keep(trajectory, "other", "first", BOX, STEP)


def test_what_goes_makes_room(
    node: Histories, trajectory: Path, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MAX_PROJECT_BYTES", size)
    for _ in range(3):
        assert node.keep(trajectory, "a", "snap", BOX, STEP)
        node.forget("a", "snap")
        node.forget("a", "snap")
        assert node.keep(trajectory, "a", "snap", BOX, STEP)
        facts = SnapshotFacts(
            project="a",
            name="snap",
            sandbox=BOX,
            step=STEP,
            packed_by="",
            description="",
            frozen_ms=0.0,
            unclean=False,
        )
        node.drop(facts)
        node.drop(facts)
    assert kept(tmp_path) == []


def test_one_that_cannot_be_put_takes_nothing(
    node: Histories, trajectory: Path, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MAX_PROJECT_BYTES", size)
    (tmp_path / "histories" / "a").write_text("in the way")
    with pytest.raises(OSError, match="a"):
        node.keep(trajectory, "a", "snap", BOX, STEP)
    (tmp_path / "histories" / "a").unlink()
    assert node.keep(trajectory, "a", "snap", BOX, STEP)
