"""Reading a trajectory, also one that is still written to: what was there when reading began."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dsec.base.errors import Interrupted
from dsec.trajectory.format import Begun, Ended, Frames, Inherited, decode, entry_at, head
from dsec.wire.sandbox import Recorded

WINDOW = 1 << 19
"""Operations whose places are known at once, in 8 MiB; a longer file is gone through again."""


class Going(NamedTuple):
    """Which operations without an end may be going on. All others of them were interrupted."""

    after: int = 0
    """All whose `seq` is above it."""
    commands: Collection[int] = ()
    """Of those up to it, these."""

    def has(self, seq: int) -> bool:
        """Whether an operation may."""
        return seq > self.after or seq in self.commands


ANY = Going()
NONE = Going(after=1 << 63)


def read(
    path: Path,
    since: int = 1,
    until: int | None = None,
    ops: Collection[str] = (),
    going: Going = ANY,
) -> Iterator[Recorded]:
    """The operations of a trajectory, in the order of their beginnings.

    Args:
        path: the file.
        since: first `seq`.
        until: last `seq`; None = all there is.
        ops: these operations only; empty = all.
        going: which may be going on.

    Raises:
        FileNotFoundError: there is no such trajectory.
    """
    with path.open("rb") as file:
        first: int | None = max(since, 1)
        while first is not None:
            places = _Places(file, first, until)
            for seq, begun_at, ended_at in places:
                begun = entry_at(file, begun_at)
                if isinstance(begun, Begun) and (not ops or begun.op in ops):
                    ended = entry_at(file, ended_at) if ended_at else None
                    ended = ended if isinstance(ended, Ended) else None
                    recorded = joined(begun, ended, inherited=seq <= places.inherited)
                    if not ended_at and not going.has(seq):
                        recorded.outcome = Interrupted.code
                    yield recorded
            first, until = places.following, places.until


class _Places:
    """Where `WINDOW` operations' beginnings and ends are (0 = nowhere): 16 bytes for each."""

    def __init__(self, file: BinaryIO, first: int, until: int | None) -> None:
        self.following: int | None = None
        """The first operation that is not among them."""
        self.inherited = 0
        """How far they are inherited."""
        self.until = 0
        """The last operation there is, of those that are wanted."""
        self._first = first
        self._begun, self._ended = array("Q"), array("Q")
        for offset, payload in Frames(file):
            found = head(payload)
            if found is None:
                continue
            if found.kind == "i":
                self.inherited = max(self.inherited, found.seq)
            elif found.seq >= first and (until is None or found.seq <= until):
                self._note(found.seq, found.kind, offset)

    def _note(self, seq: int, kind: str, offset: int) -> None:
        self.until = max(self.until, seq)
        at = seq - self._first
        if at >= WINDOW:
            self.following = min(self.following or seq, seq)
            return
        missing = bytes(8 * max(0, at + 1 - len(self._begun)))
        self._begun.frombytes(missing)
        self._ended.frombytes(missing)
        places = self._begun if kind == "b" else self._ended
        places[at] = offset

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Number, beginning, end."""
        for at, (begun_at, ended_at) in enumerate(zip(self._begun, self._ended, strict=True)):
            if begun_at:
                yield self._first + at, begun_at, ended_at


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
