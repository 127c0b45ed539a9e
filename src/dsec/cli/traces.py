"""Verbs about what has happened in sandboxes: trace, trace diff, trace replay, trace branch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from typer.core import TyperGroup
from typing_extensions import override

from dsec.base.errors import InvalidRequest
from dsec.cli import completing, history, parsing
from dsec.cli.boundary import client, verb
from dsec.cli.options import Json, Labels, SandboxId
from dsec.cli.output import Cell, note, print_json, print_json_line
from dsec.cli.progress import waiting
from dsec.kit.blocking import in_thread
from dsec.trajectory.diff import Kind, Step, diff
from dsec.trajectory.export import export
from dsec.wire.sandbox import Recorded

DIVERGED = 1
SIGNS: dict[Kind, Cell] = {
    "same": "",
    "differs": ("~", "yellow"),
    "only_left": ("<", "red"),
    "only_right": (">", "green"),
}
WORDS: dict[Kind, str] = {
    "same": "the same",
    "differs": "different",
    "only_left": "only in the first",
    "only_right": "only in the second",
}
JsonLines = Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")]
Ops = Annotated[
    list[str] | None,
    typer.Option("--op", metavar="OP", help="Only these, e.g. command, file.write; repeatable."),
]
Since = Annotated[int, typer.Option("--since", metavar="SEQ", help="First entry.", min=1)]
Until = Annotated[int | None, typer.Option("--until", metavar="SEQ", help="Last entry.", min=1)]


class ShowByDefault(TyperGroup):
    """`dsec trace SANDBOX` is `dsec trace show SANDBOX`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click, of which typer may bring its own."""
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


@verb
async def show(
    sandbox: SandboxId,
    *,
    op: Ops = None,
    since: Since = 1,
    until: Until = None,
    to: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write FILE.jsonl or FILE.parquet instead."),
    ] = None,
    json: JsonLines = False,
) -> None:
    """Show what has happened in a sandbox, in order; also when it is over.

    Of each operation its number, when it began, how it ended and how long that took.

    Examples:
      dsec trace sbx...

      dsec trace sbx... --op command --since 40 --json

      dsec trace sbx... --export run.parquet
    """
    if json and to is not None:
        raise InvalidRequest("--json prints and --export writes: say one of them")
    async with client() as dsec:
        if to is not None:
            entries = [entry async for entry in dsec.trajectory(sandbox, since, until, op or [])]
            count = await in_thread("disk", export, entries, to)
            note(f"{count} entries in {to}")
            return
        rows = None if json else history.Rows(history.HEADINGS, history.WIDTHS)
        async with dsec.trajectory(sandbox, since, until, op or []) as entries_as_they_come:
            async for entry in entries_as_they_come:
                if rows is None:
                    print_json_line(entry)
                else:
                    rows.print(history.cells(entry))


@verb
async def compare(
    left: SandboxId,
    right: Annotated[str, typer.Argument(metavar="SANDBOX", help="Another one.")],
    *,
    op: Ops = None,
    brief: Annotated[bool, typer.Option("--brief", "-q", help="Only what differs.")] = False,
    json: Json = False,
) -> int:
    """Lay what has happened in two sandboxes side by side; exit with 1 if it differs.

    A line is marked ~ if an operation's arguments, outcome or output differ, < or > if one sandbox
    alone has it.

    Example: dsec trace diff sbx... sbx...
    """
    async with client() as dsec:
        ours = [entry async for entry in dsec.trajectory(left, ops=op or [])]
        theirs = [entry async for entry in dsec.trajectory(right, ops=op or [])]
    steps = [*diff(ours, theirs)]
    if json:
        print_json(steps)
    else:
        show_steps([step for step in steps if step.kind != "same"] if brief else steps)
        _summary(steps)
    return DIVERGED if any(step.kind != "same" for step in steps) else 0


def show_steps(steps: list[Step]) -> None:
    """Two trajectories, aligned."""
    rows = history.Rows(
        ["", "SEQ", "SEQ", "OPERATION", "WHAT", "DIFFERS IN"], [1, 5, 5, 13, history.WHAT, 28]
    )
    for step in steps:
        entry = step.left or step.right
        if entry is not None:
            rows.print(_step_row(step, entry))


def _step_row(step: Step, entry: Recorded) -> list[Cell]:
    return [
        SIGNS[step.kind],
        str(step.left.seq) if step.left else "",
        str(step.right.seq) if step.right else "",
        entry.op,
        history.what(entry),
        (", ".join(step.what), "yellow"),
    ]


def _summary(steps: list[Step]) -> None:
    kinds = Counter(step.kind for step in steps)
    note(", ".join(f"{count} {WORDS[kind]}" for kind, count in kinds.items()) or "nothing")


@verb
async def replay(
    sandbox: SandboxId,
    *,
    image: Annotated[
        str | None, typer.Option("--image", help="Begin with it, not with the recorded one.")
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(
            "--snapshot",
            metavar="NAME",
            help="Begin with it, and with what came after.",
            autocompletion=completing.snapshots,
        ),
    ] = None,
    until: Until = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the fresh sandbox running; print its id.")
    ] = False,
    json: Json = False,
) -> int:
    """Do again in a fresh sandbox what was recorded of another; exit with 1 where it diverges.

    Commands run and files change in the recorded order, one after the other. What cannot be done
    again, such as a write of which only the digest was recorded, is listed and does not count.

    Examples:
      dsec trace replay sbx...

      dsec trace replay --snapshot built --keep sbx...
    """
    if image is not None and snapshot is not None:
        raise InvalidRequest("--image and --snapshot both say what to begin with")
    async with client() as dsec:
        again = await dsec.replay(sandbox, image=image, snapshot=snapshot, until=until)
        try:
            with waiting(f"replaying in {again.sandbox.id}"):
                steps = [step async for step in again]
                compared = await again.compare()
        finally:
            if not keep:
                with anyio.CancelScope(shield=True):
                    await again.sandbox.stop()
    left = [step for step in steps if step.left]
    if json:
        print_json({"sandbox": again.sandbox.id, "steps": compared, "left": left})
    else:
        show_steps(compared)
        for step in left:
            note(f"not done again: {step.entry.seq} {step.entry.op}: {step.left}")
        _summary(compared)
        if keep:
            typer.echo(again.sandbox.id)
    return DIVERGED if any(step.kind != "same" for step in compared) else 0


@verb
async def branch(
    sandbox: SandboxId,
    *,
    step: Annotated[
        int,
        typer.Option(
            "--step",
            metavar="SEQ",
            help="Last entry to be in it.",
            min=1,
            autocompletion=completing.entries,
        ),
    ],
    label: Labels = None,
    allow_divergence: Annotated[
        bool,
        typer.Option("--allow-divergence", help="Keep it although something came out otherwise."),
    ] = False,
    json: Json = False,
) -> None:
    """Make a sandbox as one was after a step, also when that is over; print its id.

    It begins with the nearest snapshot of that sandbox, or as it began, and what was recorded from
    there to the step is done again. Where that diverges it is stopped, and this fails.

    Examples:
      dsec trace branch sbx... --step 41

      dsec trace branch sbx... --step 41 -l try=b --allow-divergence
    """
    labels = None if label is None else parsing.pairs(label, "label")
    async with client() as dsec:
        with waiting(f"branching {sandbox} at {step}"):
            made = await dsec.branch(sandbox, step, labels=labels, strict=not allow_divergence)
    if made.cleaned:
        note(f"{made.snapshot} was packed without residue (dsec pack --help): that is missing")
    begun = f"snapshot {made.snapshot}" if made.snapshot else "its own beginning"
    note(f"begun with {begun}, step {made.start}; {len(made.steps)} steps done again")
    for parted in made.divergences:
        note(f"diverged: {parted}")
    if json:
        print_json(
            {
                "sandbox": made.sandbox.id,
                "snapshot": made.snapshot,
                "start": made.start,
                "steps": made.steps,
                "left": made.left,
                "divergences": made.divergences,
            }
        )
    else:
        typer.echo(made.sandbox.id)
