"""Where in a trajectory an operation is, by its caller's id of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dsec.trajectory import writer
from dsec.trajectory.format import (
    MAGIC,
    Begun,
    Ended,
    Frames,
    Inherited,
    decode,
    entry_at,
    head,
    outcome,
)

COMMAND = "command"
OK = "ok"
UNKNOWN = frozenset({"unavailable", "deadline_exceeded", "internal_error"})
"""Outcomes after which an operation may or may not have happened."""


class Place(NamedTuple):
    """Where an operation's beginning and end are in the file; 0 = not there."""

    seq: int
    begun_at: int
    ended_at: int = 0


def name_of(op: str, ident: str) -> str:
    """What an operation is found by; ids of commands and idempotency keys are looked up apart."""
    return f"{'c' if op == COMMAND else 'k'}{ident}"


class Index:
    """Of one trajectory. Whoever adds to the file tells it."""

    __slots__ = ("_open", "_places", "last", "size")

    def __init__(self) -> None:
        self.last = 0
        """The highest `seq`."""
        self.size = len(MAGIC)
        """Of the file, in bytes."""
        self._places: dict[str, Place] = {}
        self._open: dict[int, str] = {}

    def __len__(self) -> int:
        """How many ids it knows."""
        return len(self._places)

    def find(self, op: str, ident: str) -> Place | None:
        """Where the operation of that id is."""
        return self._places.get(name_of(op, ident))

    def taken(self, op: str, ident: str) -> bool:
        """Whether an id is that of another kind of operation: a command's, or an idempotency key."""
        other = "" if op == COMMAND else COMMAND
        return self.find(other, ident) is not None

    @property
    def running(self) -> list[str]:
        """Ids of the commands whose end is not there."""
        return [name[1:] for name in self._open.values() if name[:1] == "c"]

    def running_before(self, seq: int) -> dict[int, str]:
        """Ids of the commands up to there whose end is not there."""
        return {at: name[1:] for at, name in self._open.items() if at <= seq and name[:1] == "c"}

    def is_open(self, seq: int) -> bool:
        """Whether an operation's end is not there."""
        return seq in self._open

    def begun(self, entry: Begun, offset: int) -> None:
        """Note a beginning."""
        self.last = max(self.last, entry.seq)
        name = name_of(entry.op, entry.id) if entry.id else ""
        self._open[entry.seq] = name
        if name:
            self._places[name] = Place(entry.seq, offset)

    def ended(self, seq: int, offset: int, outcome: str) -> None:
        """Note an end. One that was refused did not happen: its id is free again."""
        if outcome != OK and outcome not in UNKNOWN:
            self.forget(seq)
            return
        name = self._open.pop(seq, None)
        if name and outcome == OK:
            self._places[name] = self._places[name]._replace(ended_at=offset)

    def forget(self, seq: int) -> None:
        """Free an operation's id."""
        name = self._open.pop(seq, None)
        if name and self._places[name].seq == seq:
            del self._places[name]

    def leave_behind(self, until: int) -> None:
        """What ran in the parent does not run here: its id is free again."""
        for seq in [seq for seq in self._open if seq <= until]:
            self.forget(seq)


def load(path: Path) -> Index:
    """Read a trajectory's index, and cut off what a killed writer left of a frame.

    What is added while it is read may or may not be in it.

    Raises:
        FileNotFoundError: there is no such trajectory.
    """
    index, until = Index(), 0
    with path.open("r+b", buffering=0) as file:
        frames = Frames(file)
        for offset, payload in frames:
            found = head(payload)
            if found is None:
                continue
            if found.kind == "e":
                index.ended(found.seq, offset, outcome(payload))
                continue
            entry = decode(payload)
            if isinstance(entry, Begun):
                index.begun(entry, offset)
            elif isinstance(entry, Inherited):
                until = max(until, entry.until)
        index.size = writer.cut(file, frames.end)
    index.last = max(index.last, until)
    index.leave_behind(until)
    return index


def entries(path: Path, place: Place) -> tuple[Begun | None, Ended | None]:
    """The beginning and end of an operation.

    Raises:
        FileNotFoundError: there is no such trajectory.
    """
    with path.open("rb") as file:
        begun = entry_at(file, place.begun_at)
        ended = entry_at(file, place.ended_at) if place.ended_at else None
    return (
        begun if isinstance(begun, Begun) else None,
        ended if isinstance(ended, Ended) else None,
    )
