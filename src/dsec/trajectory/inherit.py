"""A child's trajectory begins with its parent's, up to a step: replaying that far gives what was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from dsec.trajectory import writer
from dsec.trajectory.format import (
    MAGIC,
    Begun,
    Ended,
    Frames,
    Inherited,
    decode,
    frame,
    framed,
    head,
)
from dsec.trajectory.reader import inherited_until

COPY_BYTES = 64 << 20


def inherit(parent: Path, until: int, child: Path) -> int:
    """Begin a trajectory with another's entries.

    What the child has recorded already follows them, with new numbers. Done twice it is done once.
    The child must not be written to meanwhile.

    Args:
        parent: the file to begin with; it may be written to.
        until: the last `seq` to take; its and earlier ones' ends come along if they are there.
        child: the file to make, or to put them into; it appears whole or not at all.

    Returns:
        The last `seq` that is inherited: less than `until` if the parent has not as many.

    Raises:
        FileNotFoundError: the parent has none. OSError: e.g. the disk is full.
    """
    own = child if child.exists() else None
    if own is not None and (known := inherited_until(own)):
        return known
    scratch = child.with_name(f".{child.name}.new")
    try:
        with parent.open("rb") as source, scratch.open("wb") as target:
            os.fchmod(target.fileno(), writer.PRIVATE)
            last, end, whole = _survey(source, until)
            target.write(MAGIC + frame(Inherited(last)))
            if whole:
                target.flush()
                _copy(source, end, target)
            else:
                _pick(source, last, target)
            if own is not None:
                _renumber(own, last, target)
        scratch.rename(child)
    finally:
        scratch.unlink(missing_ok=True)
    return last


def _survey(source: BinaryIO, until: int) -> tuple[int, int, bool]:
    """The last entry to take, the end of the file, and whether all of it is taken."""
    last = beyond = 0
    frames = Frames(source)
    for _, payload in frames:
        found = head(payload)
        if found is not None and found.kind != "i":
            if found.seq <= until:
                last = max(last, found.seq)
            else:
                beyond += 1
    return last, frames.end, not beyond


def _copy(source: BinaryIO, end: int, target: BinaryIO) -> None:
    """All frames, without looking at them; the kernel copies, or shares what can be shared."""
    at, to = len(MAGIC), target.tell()
    while at < end:
        size = min(COPY_BYTES, end - at)
        done = os.copy_file_range(source.fileno(), target.fileno(), size, at, to)
        if not done:
            raise EOFError("the parent's trajectory has become shorter")
        at, to = at + done, to + done
    target.seek(to)


def _pick(source: BinaryIO, last: int, target: BinaryIO) -> None:
    for _, payload in Frames(source):
        found = head(payload)
        if found is not None and found.kind != "i" and found.seq <= last:
            target.write(framed(payload))


def _renumber(own: Path, by: int, target: BinaryIO) -> None:
    with own.open("rb") as file:
        for _, payload in Frames(file):
            entry = decode(payload)
            if isinstance(entry, Begun | Ended):
                target.write(frame(msgspec.structs.replace(entry, seq=entry.seq + by)))
