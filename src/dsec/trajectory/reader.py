"""Reading a trajectory, also one that is still written to: what was there when reading began."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dsec.trajectory.format import Begun, Ended, Frames, Inherited, decode, entry_at, head
from dsec.wire.sandbox import Recorded


def read(
    path: Path, since: int = 1, until: int | None = None, ops: Collection[str] = ()
) -> Iterator[Recorded]:
    """The operations of a trajectory, in the order of their beginnings.

    Args:
        path: the file.
        since: first `seq`.
        until: last `seq`; None = all there is.
        ops: these operations only; empty = all.

    Raises:
        FileNotFoundError: there is no such trajectory.
    """
    with path.open("rb") as file:
        places, inherited = _places(file, since, until)
        for seq in sorted(places):
            begun_at, ended_at = places[seq]
            begun = entry_at(file, begun_at) if begun_at else None
            if isinstance(begun, Begun) and (not ops or begun.op in ops):
                ended = entry_at(file, ended_at) if ended_at else None
                ended = ended if isinstance(ended, Ended) else None
                yield joined(begun, ended, inherited=seq <= inherited)


def _places(
    file: BinaryIO, since: int, until: int | None
) -> tuple[dict[int, tuple[int, int]], int]:
    """Where each operation's beginning and end are (0 = nowhere), and how far it is inherited."""
    places: dict[int, tuple[int, int]] = {}
    inherited = 0
    for offset, payload in Frames(file):
        found = head(payload)
        if found is None:
            continue
        if found.kind == "i":
            inherited = max(inherited, found.seq)
        elif found.seq >= since and (until is None or found.seq <= until):
            begun_at, ended_at = places.get(found.seq, (0, 0))
            places[found.seq] = (offset, ended_at) if found.kind == "b" else (begun_at, offset)
    return places, inherited


def inherited_until(path: Path) -> int:
    """The last inherited operation; 0 = none is."""
    with path.open("rb") as file:
        for _, payload in Frames(file):
            entry = decode(payload)
            return entry.until if isinstance(entry, Inherited) else 0
    return 0


def joined(begun: Begun, ended: Ended | None, *, inherited: bool = False) -> Recorded:
    """An operation as callers see it."""
    recorded = Recorded(
        seq=begun.seq,
        op=begun.op,
        id=begun.id,
        caller=begun.caller,
        at=begun.at,
        args=begun.args,
        inherited=inherited,
    )
    if ended is not None:
        recorded.ended_at = ended.at
        recorded.outcome = ended.outcome
        recorded.result = ended.result
        recorded.stdout, recorded.stderr = ended.stdout, ended.stderr
        if ended.digest:
            body: dict[str, Any] = {"size_bytes": ended.size_bytes, "sha256": ended.digest.hex()}
            body |= {"data": ended.body} if ended.body else {}
            recorded.args = {**begun.args, "body": body}
    return recorded
