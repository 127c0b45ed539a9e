"""Verbs about snapshots."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.base.clock import SystemClock
from dsec.base.quantity import format_size
from dsec.cli.boundary import client, verb
from dsec.cli.completing import snapshots as complete
from dsec.cli.options import Json, SnapshotName
from dsec.cli.output import Cell, age, clean, print_json, print_table
from dsec.cli.state import show_diff
from dsec.wire.sandbox import SnapshotView


@verb
async def ls(*, json: Json = False) -> None:
    """List the snapshots of your project, newest first; sizes are of the files that differ.

    Example: dsec snapshot ls
    """
    async with client() as dsec:
        found = await dsec.snapshots.list()
    if json:
        print_json(found)
        return
    now = SystemClock().now()
    columns = ["NAME", "PARENT", "DEPTH", "ENTRIES", "SIZE", "AGE", "STORED", "DESCRIPTION"]
    print_table(columns, [_row(view, now) for view in found])


def _row(view: SnapshotView, now: float) -> list[Cell]:
    return [
        view.name,
        view.parent,
        str(view.depth),
        str(view.entries),
        format_size(view.size_bytes),
        age(now - view.created_at) if view.created_at else "",
        _stored(view),
        view.description,
    ]


def _stored(view: SnapshotView) -> Cell:
    if view.conflict:
        return ("name taken", "red")
    return "yes" if view.stored else "on one node"


@verb
async def show(name: SnapshotName, *, json: Json = False) -> None:
    """Show what is known of a snapshot.

    Example: dsec snapshot show built
    """
    async with client() as dsec:
        view = await dsec.snapshots.get(name)
    if json:
        print_json(view)
        return
    now = SystemClock().now()
    facts: list[tuple[str, Cell]] = [
        ("name", view.name),
        ("image", view.image),
        ("digest", view.digest),
        ("packed over", view.parent),
        ("depth", str(view.depth)),
        ("sandbox", view.sandbox),
        ("step", str(view.step)),
        ("packed by", view.packed_by),
        ("age", age(now - view.created_at) if view.created_at else ""),
        ("files", f"{view.entries} entries, {format_size(view.size_bytes)}"),
        ("left out", str(view.left_out)),
        ("residue", "cleaned away" if view.cleaned else ("kept: for who packed it", "yellow")),
        ("stored", _stored(view)),
        ("description", view.description),
    ]
    print_table(["FACT", "VALUE"], [list(fact) for fact in facts])


@verb
async def rm(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Names of snapshots.", autocompletion=complete),
    ],
) -> None:
    """Remove snapshots. One that a sandbox stands on stays until that has stopped.

    Example: dsec snapshot rm built
    """
    async with client() as dsec:
        for name in names:
            await dsec.snapshots.remove(name)
            typer.echo(clean(name))


@verb
async def diff(name: SnapshotName, *, json: Json = False) -> None:
    """List the files a snapshot has added, modified and removed.

    Example: dsec snapshot diff built
    """
    async with client() as dsec:
        found = await dsec.snapshots.diff(name)
    show_diff(found, json=json)
