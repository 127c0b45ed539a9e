"""The small files of a control group. One that is not there reads as nothing."""

from __future__ import annotations

import os
from pathlib import Path

Writes = list[tuple[str, str]]


def read(path: Path) -> str:
    """The text of a file, "" if it or its directory is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def number(path: Path) -> int:
    """The number in a file; 0 if it is not there or says `max`."""
    text = read(path).strip()
    return int(text) if text.isdigit() else 0


def keyed(path: Path) -> dict[str, int]:
    """The lines `name number` of a file."""
    pairs = (line.split() for line in read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def write(path: Path, text: str) -> None:
    """Write into a file that is there; none is made.

    Raises:
        FileNotFoundError: the file or its group is gone. OSError: naming the file.
    """
    # Without O_CREAT: a group that is gone must be an error of its own kind.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    except OSError as exc:
        raise OSError(exc.errno, f"write {text}: {exc.strerror}", str(path)) from None
    finally:
        os.close(descriptor)
