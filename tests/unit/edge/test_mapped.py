"""Files that processes share by mapping them, found below a tree that mirrors their root."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from dsec.linux import mapped
from dsec.linux.mapped import shared_files

ME = os.getpid()


def key(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def mirror(tree: Path, path: Path) -> Path:
    """The same path below the tree, as an overlay's upper directory has it."""
    target = tree / str(path).lstrip("/")
    target.parent.mkdir(parents=True)
    target.write_bytes(b"x" * 4096)
    return target


def test_a_shared_mapping_is_found_by_its_path_and_a_private_one_is_not(tmp_path: Path) -> None:
    tree, home = tmp_path / "tree", tmp_path / "odd name\nof\\two lines"
    home.mkdir()
    shared, private = home / "shared", home / "private"
    for path in (shared, private):
        path.write_bytes(b"x" * 4096)
    inside = mirror(tree, shared)
    with shared.open("r+b") as one, private.open("rb") as two:
        with mmap.mmap(one.fileno(), 0), mmap.mmap(two.fileno(), 0, access=mmap.ACCESS_COPY):
            assert shared_files([ME], tree) == {key(inside)}
        assert shared_files([ME], tree) == frozenset()


def test_links_on_the_way_are_not_followed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    file = tmp_path / "file"
    file.write_bytes(b"x" * 4096)
    place = tree / str(tmp_path).lstrip("/")
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        assert shared_files([ME], tree) == frozenset()
    place.unlink()
    place.mkdir()
    (place / "file").symlink_to(file)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        assert shared_files([ME], tree) == {key(place / "file")}  # the link itself


def test_a_process_that_has_ended_has_none(tmp_path: Path) -> None:
    assert shared_files([(1 << 22) + 1], tmp_path) == frozenset()


def test_there_is_a_limit_to_what_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MAX_BYTES", 100)
    with pytest.raises(OverflowError):
        shared_files([ME], tmp_path)
