from __future__ import annotations

import os
import subprocess
from pathlib import Path

from dsec.linux.disk_use import MAX_DEPTH, allocated_bytes


def test_it_is_what_du_says(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/large").write_bytes(bytes(range(256)) * 10_000)
    (tmp_path / "a/b/twice").hardlink_to(tmp_path / "a/large")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "elsewhere").symlink_to("/usr")
    said = subprocess.run(["du", "-s", "-B1", tmp_path], capture_output=True, check=True).stdout
    own = tmp_path.stat().st_blocks * 512
    assert allocated_bytes(tmp_path, 10) == int(said.split()[0]) - own


def test_a_tree_without_end_is_left(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(3000):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
    finally:
        os.close(here)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert allocated_bytes(tmp_path, 10) <= (MAX_DEPTH + 1) * 4096
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)


def test_time_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert allocated_bytes(tmp_path, -1.0) == 0
    assert allocated_bytes(tmp_path / "nonesuch", 1) == 0
