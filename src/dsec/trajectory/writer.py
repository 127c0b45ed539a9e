"""Adding to a trajectory. Nothing is synced: a killed writer leaves the page cache behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dsec.trajectory.format import MAGIC, Entry, Frames, frame

PRIVATE = 0o600


def create(path: Path, entries: Sequence[Entry] = ()) -> None:
    """Begin a trajectory.

    Raises:
        FileExistsError: there is one.
    """
    data = MAGIC + b"".join(frame(entry) for entry in entries)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    try:
        _write(file, data, 0)
    finally:
        os.close(file)


def append(path: Path, data: bytes) -> int:
    """Add whole frames at the end, all of them or nothing; where they begin.

    Only one may add to a file at a time.

    Raises:
        FileNotFoundError: there is no such trajectory. OSError: e.g. the disk is full.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        _write(file, data, size)
        return size
    finally:
        os.close(file)


def _write(file: int, data: bytes, size: int) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(file, view) :]
    except OSError:
        os.ftruncate(file, size)
        raise


def mend(path: Path) -> int:
    """Cut off what a killed writer left of a frame; the size that stays.

    Raises:
        FileNotFoundError: there is no such trajectory.
    """
    with path.open("r+b") as file:
        frames = Frames(file)
        for _ in frames:
            pass
        cut(file.fileno(), frames.end)
        return max(frames.end, len(MAGIC))


def cut(file: int, end: int) -> None:
    """Have an open trajectory end there. One that has not even its magic gets it."""
    if end < len(MAGIC):
        os.ftruncate(file, 0)
        os.pwrite(file, MAGIC, 0)
    elif os.fstat(file).st_size > end:
        os.ftruncate(file, end)
