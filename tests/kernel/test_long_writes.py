"""A write that never ends, to a pipe nobody reads: it is called off, runs out of time, dies with us."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.kit.recall import Recall
from dsec.linux.long_writes import write_long
from tests.kernel.launching import wait_until
from tests.kernel.test_edge import aether

__all__ = ["aether"]
ALONE = """
import sys
from pathlib import Path
from dsec.kit.recall import Recall
from dsec.linux.long_writes import write_long
write_long(Path(sys.argv[1]), Path(sys.argv[2]), "0", Recall(), 600)
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    os.mkfifo(tmp_path / "pipe")
    yield tmp_path / "pipe"
    assert writers(tmp_path / "pipe") == []


def writers(file: Path) -> list[str]:
    """Processes of the helper that write into it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"write", bytes(file)]:
                found.append(process.name)
    return found


def test_it_writes(aether: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_long(aether, tmp_path / "file", "some", Recall(), 600)
    assert (tmp_path / "file").read_text() == "some"
    write_long(aether, tmp_path / "none", "some", Recall(), 600)
    assert not (tmp_path / "none").exists()


def test_it_is_called_off(aether: Path, pipe: Path) -> None:
    recall = Recall()
    writing = threading.Thread(target=write_long, args=(aether, pipe, "0", recall, 600))
    writing.start()
    wait_until(lambda: bool(writers(pipe)), lambda: "it does not write")
    recall.call()
    writing.join(60)
    assert not writing.is_alive()


def test_it_has_its_time(aether: Path, pipe: Path) -> None:
    write_long(aether, pipe, "0", Recall(), 0.01)


def test_it_ends_with_who_wants_it(aether: Path, pipe: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ALONE, aether, pipe]) as wanting:
        wait_until(lambda: bool(writers(pipe)) or bool(wanting.poll()), lambda: "it does not write")
        wanting.kill()
    wait_until(lambda: not writers(pipe), lambda: "it goes on")


def test_without_the_helper_it_says_so(pipe: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-helper"):
        write_long(Path("/no-helper"), pipe, "0", Recall(), 600)
