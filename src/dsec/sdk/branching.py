"""Where a branch of a trajectory may begin, and what of it is not as it was. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dsec.base.errors import InvalidRequest, NotFound
from dsec.base.snapshots import is_snapshot
from dsec.sdk.replaying import CREATION, Replayed, made_as, no_creation
from dsec.trajectory.diff import Step
from dsec.wire.sandbox import Recorded, SandboxSpec, SnapshotView


@dataclass(frozen=True, slots=True)
class Start:
    """What a branch may begin with."""

    step: int
    """Its files are as they were after this entry."""
    spec: SandboxSpec
    """What the branch is made as."""
    snapshot: str = ""
    """Whose files it has; "": it begins as the sandbox itself did."""
    cleaned: bool = False
    """Of what was written, residue was left out of that snapshot."""
    digest: str = ""
    """Of the image that sandbox began with."""


def starts(
    entries: Sequence[Recorded],
    snapshots: Iterable[SnapshotView],
    sandbox: str,
    *,
    labels: Mapping[str, str] | None = None,
) -> list[Start]:
    """Where a branch after the last of these entries may begin, the nearest first.

    Args:
        entries: of the sandbox's trajectory, from its first.
        snapshots: all there are.
        sandbox: its id.
        labels: of the branch; None: the sandbox's.

    Raises:
        NotFound: the trajectory does not say how the sandbox was made.
    """
    made = [entry for entry in entries if entry.op == CREATION]
    if not made:
        raise no_creation()
    spec = made_as(made[-1])
    if labels is not None:
        spec = msgspec.structs.replace(spec, labels=dict(labels))
    until = _lineage(made, sandbox, entries[-1].seq)
    found = [_origin(entry, spec) for entry in made if not entry.args.get("parent")]
    found += [
        Start(view.step, _restored(spec, view.image), view.name, view.cleaned)
        for view in snapshots
        if 0 < view.step <= until.get(view.sandbox, 0) and not view.conflict
    ]
    return sorted(found, key=lambda start: (-start.step, start.cleaned))


def _lineage(made: Iterable[Recorded], sandbox: str, last: int) -> dict[str, int]:
    """The sandbox and those it was forked from, with the last entry it shares with each."""
    forked = {str(entry.args.get("parent")): entry.seq - 1 for entry in made}
    return forked | {sandbox: last}


def _origin(entry: Recorded, spec: SandboxSpec) -> Start:
    """As the sandbox itself began, of an image or a snapshot."""
    first = made_as(entry)
    if is_snapshot(first.image):
        return Start(entry.seq, _restored(spec, first.image))
    own = msgspec.structs.replace(
        spec, image=first.image, workspace=first.workspace, toolkits=first.toolkits
    )
    return Start(entry.seq, own, digest=str(entry.args.get("image_digest", "")))


def _restored(spec: SandboxSpec, image: str) -> SandboxSpec:
    """Of a snapshot: workspace and toolkits are in it."""
    return msgspec.structs.replace(spec, image=image, workspace=None, toolkits=[])


def check_reaches(entries: Sequence[Recorded], step: int) -> None:
    """See that a trajectory goes as far as a step.

    Raises:
        InvalidRequest: it does not. NotFound: it has no beginning.
    """
    if step < 1:
        raise InvalidRequest("steps are counted from 1", step=step)
    if not entries:
        raise NotFound("nothing is on record", kind="trajectory")
    if entries[-1].seq < step:
        raise InvalidRequest(f"its trajectory has no step {step}: it ends at {entries[-1].seq}")


def divergences(steps: Iterable[Step], left: Iterable[Replayed]) -> Iterator[str]:
    """What came out otherwise, and what was not done again, in words, in order."""
    said = {replayed.entry.seq: f"was not done again: {replayed.left}" for replayed in left}
    said |= {seq: words for step in steps for seq, words in _of_step(step)}
    yield from (f"step {seq} {words}" for seq, words in sorted(said.items()))


def _of_step(step: Step) -> Iterator[tuple[int, str]]:
    if step.kind == "differs" and step.left:
        yield step.left.seq, f"({step.left.op}) differs in {', '.join(step.what)}"
    elif step.kind == "only_left" and step.left:
        yield step.left.seq, f"({step.left.op}) was not recorded this time"


def missing(entries: Sequence[Recorded], start: int, step: int) -> str:
    """Which operations between two steps are not on record, in words; "" if all are."""
    known = {entry.seq for entry in entries}
    gaps = [str(seq) for seq in range(start + 1, step + 1) if seq not in known]
    return f"not on record: {', '.join(gaps[:10])}" if gaps else ""
