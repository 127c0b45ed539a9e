"""Verbs about the store that nodes share."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.base.quantity import format_size
from dsec.cli.boundary import client, verb
from dsec.cli.options import Json
from dsec.cli.output import Cell, clean, note, print_json, print_table
from dsec.wire.public_v1 import StoreView


@verb
async def show(*, json: Json = False) -> None:
    """Show the store as each node sees it, and what the node keeps of it."""
    async with client() as dsec:
        found = await dsec.store.show()
    if json:
        print_json(found)
        return
    print_table(
        ["NODE", "STORE", "STATE", "LOADED BY", "CACHE", "BUDGET", "FETCHED", "REQUESTS"],
        [_row(view) for view in found],
    )
    for view in found:
        if view.detail:
            note(f"{view.node}: {view.detail}")


def _row(view: StoreView) -> list[Cell]:
    state: Cell = ("reachable", "green") if view.reachable else ("unreachable", "red")
    return [
        view.node,
        view.url or "none",
        state if view.url else "",
        view.front,
        format_size(view.cache_used_bytes),
        format_size(view.cache_budget_bytes),
        format_size(view.fetched_bytes),
        str(view.requests),
    ]


@verb
async def gc(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove from the store what no image and no layer refers to."""
    async with client() as dsec:
        report = await dsec.store.collect(dry_run=dry_run)
    if json:
        print_json(report)
        return
    done = "would remove" if report.dry_run else "removed"
    typer.echo(
        f"{done} {report.blobs} blobs, {format_size(report.bytes)}; {report.kept_blobs} are needed"
    )
    if report.detail:
        note(clean(report.detail))
