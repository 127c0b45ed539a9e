"""Two trajectories side by side: where operations, outcomes or outputs part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct, field

from dsec.wire.sandbox import Captured, Recorded

Kind = Literal["same", "differs", "only_left", "only_right"]
CHANGING = frozenset(
    {
        *("pid", "started_at", "duration_s", "mtime", "command_id", "at"),
        *("id", "node", "parent", "created_at", "ended_at", "idle_since", "pause"),
        *("sandbox", "frozen_ms", "duration_ms"),
    }
)
"""What a result (of a command, a file, a sandbox, a snapshot) says that no two runs share."""


class Step(Struct, kw_only=True, frozen=True):
    """An operation of one or both."""

    kind: Kind
    left: Recorded | None = None
    right: Recorded | None = None
    what: list[str] = field(default_factory=list)
    """What differs: `args`, `outcome`, `exit_code`, `result.<name>`, `stdout`, `stderr`."""


def diff(left: Iterable[Recorded], right: Iterable[Recorded]) -> Iterator[Step]:
    """Align two trajectories, in order.

    Operations pair off by their ids where both name one, else in their order, so far as they are
    the same operation. Neither is read further than the alignment needs.
    """
    ours, theirs = list(left), list(right)
    known = {entry.id: at for at, entry in enumerate(theirs) if entry.id}
    done = 0
    for entry in ours:
        at = _partner(entry, theirs, done, known)
        if at is None:
            yield Step(kind="only_left", left=entry)
            continue
        yield from (Step(kind="only_right", right=skipped) for skipped in theirs[done:at])
        done = at + 1
        yield _compared(entry, theirs[at])
    yield from (Step(kind="only_right", right=entry) for entry in theirs[done:])


def _partner(
    entry: Recorded, theirs: list[Recorded], done: int, known: dict[str, int]
) -> int | None:
    if entry.id and (at := known.get(entry.id)) is not None and at >= done:
        return at
    if done < len(theirs) and _alike(entry, theirs[done]):
        return done
    return None


def _alike(one: Recorded, other: Recorded) -> bool:
    """Whether they may be the same step though they bear other ids."""
    return one.op == other.op and one.args == other.args


def _compared(left: Recorded, right: Recorded) -> Step:
    what = list(_differences(left, right))
    return Step(kind="differs" if what else "same", left=left, right=right, what=what)


def _differences(left: Recorded, right: Recorded) -> Iterator[str]:
    if left.op != right.op:
        yield "op"
    if left.args != right.args:
        yield "args"
    if left.outcome != right.outcome:
        yield "outcome"
    yield from _result_differences(left.result, right.result)
    if _shown(left.stdout) != _shown(right.stdout):
        yield "stdout"
    if _shown(left.stderr) != _shown(right.stderr):
        yield "stderr"


def _result_differences(left: dict[str, Any], right: dict[str, Any]) -> Iterator[str]:
    for name in sorted((left.keys() | right.keys()) - CHANGING):
        if left.get(name) != right.get(name):
            yield name if name == "exit_code" else f"result.{name}"


def _shown(captured: Captured | None) -> tuple[bytes, int]:
    return (captured.join(), captured.dropped_bytes) if captured else (b"", 0)
