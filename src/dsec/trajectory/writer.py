"""Adding to a trajectory. Nothing is synced: a killed writer leaves the page cache behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

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

    Whoever else adds to the file, or cuts it, is waited for; blocks as long as their writing does.

    Raises:
        FileNotFoundError: there is no such trajectory. OSError: e.g. the disk is full.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        with _alone(file):
            size = os.fstat(file).st_size
            _write(file, data, size)
        return size
    finally:
        os.close(file)


@contextlib.contextmanager
def _alone(file: int) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:  # closing is not enough if a child has the descriptor as well
        fcntl.flock(file, fcntl.LOCK_UN)


def _write(file: int, data: bytes, size: int) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(file, view) :]
    except OSError:
        os.ftruncate(file, size)
        raise


def cut(file: BinaryIO, end: int) -> int:
    """Cut off what a killed writer left of a frame; the size that stays.

    A frame that somebody has added meanwhile is whole, as all are while nobody is writing: it stays.

    Args:
        file: open for reading and writing, without a buffer.
        end: where whole frames were seen to end. A file without even its magic gets it.
    """
    with _alone(file.fileno()):
        frames = Frames(file, end)
        for _ in frames:
            pass
        if frames.end < len(MAGIC):
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), MAGIC, 0)
        elif os.fstat(file.fileno()).st_size > frames.end:
            os.ftruncate(file.fileno(), frames.end)
        return max(frames.end, len(MAGIC))
