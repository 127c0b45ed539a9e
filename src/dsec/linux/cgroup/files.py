"""Reading the small files of a control group. A file that is not there reads as nothing."""

from __future__ import annotations

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
