# Generated from ../_async by tools/unasync.py; do not edit.
"""A sandbox as another was after one of its steps: restored, and what came then done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from dsec.base.errors import Conflict, DsecError, NotFound, PermissionDenied
from dsec.sdk import _blocking
from dsec.sdk._http import segment
from dsec.sdk._ids import Ids
from dsec.sdk._sync.call import Caller
from dsec.sdk._sync.replay import H, Replay, made
from dsec.sdk._sync.snapshots import Snapshots
from dsec.sdk._sync.state import Trajectory
from dsec.sdk.branching import Start, check_reaches, divergences, missing, starts
from dsec.sdk.replaying import Replayed
from dsec.trajectory.diff import Step
from dsec.wire.sandbox import Recorded, SandboxView

START_S = 120.0
STOP_S = 120.0
OFTEN = 8
"""It is looked at again when an eighth more is done: looking takes no longer than doing."""


@dataclass
class Branch(Generic[H]):
    """A branch of a trajectory, and how true it is."""

    sandbox: H
    """It goes on."""
    snapshot: str = ""
    """It begins with this one; "": as the sandbox itself began."""
    cleaned: bool = False
    """That one was taken without residue: caches, histories, logs, /tmp are not in it."""
    start: int = 0
    """How many entries are in what it begins with; those after were done again."""
    steps: list[Step] = field(default_factory=list)
    """What was recorded beside what has come of it."""
    left: list[Replayed] = field(default_factory=list)
    """What was not done again."""
    otherwise: list[str] = field(default_factory=list)
    """What else is not as it was, in words."""

    @property
    def divergences(self) -> list[str]:
        """All that is not as it was, in words; empty: as far as can be told it is the same."""
        return [*self.otherwise, *divergences(self.steps, self.left)]


def branch(  # noqa: PLR0913 - keywords
    hand: Callable[[Caller, SandboxView], H],
    caller: Caller,
    sandbox: str,
    step: int,
    *,
    labels: Mapping[str, str] | None,
    strict: bool,
    timeout: float,
) -> Branch[H]:
    """See `DSecClient.branch`."""
    caller = caller.numbering(
        Ids()
    )  # its operations are no steps of the one it is branched from
    path = f"/v1/sandboxes/{segment(sandbox)}/trajectory"
    with Trajectory(caller, path, 1, step, ()) as told:
        entries = [entry for entry in told]
    check_reaches(entries, step)
    snapshots = Snapshots(caller).list()
    possible = starts(entries, snapshots, sandbox, labels=labels)
    start, view = _begun(caller, possible, timeout)
    replay = Replay(
        hand, caller, view, [entry for entry in entries if entry.seq > start.step]
    )
    try:
        found = Branch(replay.sandbox, start.snapshot, start.cleaned, start.step)
        found.otherwise += _otherwise(entries, start, step, view)
        _follow(replay, found, strict=strict)
    except BaseException:
        with _blocking.finishing(STOP_S):
            replay.sandbox.stop()
        raise
    return found


def _begun(
    caller: Caller, possible: Sequence[Start], timeout: float
) -> tuple[Start, SandboxView]:
    """The nearest that can be had: a snapshot may be somebody else's, or gone by now."""
    refused: DsecError | None = None
    for start in possible:
        try:
            return start, made(caller, start.spec, timeout)
        except (NotFound, PermissionDenied) as exc:
            refused = exc
    raise refused or NotFound("there is nothing left to begin with", kind="snapshot")


def _otherwise(
    entries: Sequence[Recorded], start: Start, step: int, view: SandboxView
) -> list[str]:
    found = []
    if start.digest and view.image_digest and start.digest != view.image_digest:
        found.append(f"image {view.image} is another one now: {view.image_digest}")
    if gaps := missing(entries, start.step, step):
        found.append(gaps)
    return found


def _follow(replay: Replay[H], found: Branch[H], *, strict: bool) -> None:
    count = due = 0
    for replayed in replay:
        count += 1
        if replayed.left:
            found.left.append(replayed)
        if strict and (count > due or replayed.left):
            due = count + count // OFTEN
            found.steps = replay.compare()
            _check(found)
    found.steps = replay.compare()
    if strict:
        _check(found)


def _check(found: Branch[H]) -> None:
    if parted := found.divergences:
        raise Conflict(
            f"the branch is not what was recorded: {parted[0]}. It was stopped; with "
            "strict=False (--allow-divergence) it is kept",
            kind="diverged",
        )
