"""Verbs about sandboxes: ls, stop, ps, stats."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.base.clock import SystemClock
from dsec.base.errors import InvalidRequest
from dsec.base.quantity import format_duration, format_size
from dsec.base.states import SandboxState
from dsec.cli import parsing
from dsec.cli.boundary import client, verb
from dsec.cli.completing import LIVE
from dsec.cli.many import on_each, report_all
from dsec.cli.options import Job, Json, Labels, SandboxId
from dsec.cli.output import Cell, age, print_json, print_table, styled
from dsec.wire.sandbox import SandboxView, Usage

All = Annotated[bool, typer.Option("--all", "-a", help="Those that are over, too.")]


@verb
async def ls(
    *,
    every: All = False,
    label: Labels = None,
    job: Job = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only ids.")] = False,
    json: Json = False,
) -> None:
    """List your sandboxes, newest first.

    Examples:
      dsec ls

      dsec ls --all --label job=7 --json
    """
    async with client() as dsec:
        labels = parsing.pairs(label or [], "label")
        views = await dsec.list(labels=labels, states=None if every else LIVE, job=job)
    if json:
        print_json(views)
    elif quiet:
        for view in views:
            typer.echo(view.id)
    else:
        now = SystemClock().now()
        print_table(
            ["ID", "IMAGE", "STATE", "AGE", "LIMITS", "LABELS"], [_row(v, now) for v in views]
        )


def _row(view: SandboxView, now: float) -> list[Cell]:
    limits = f"{view.limits.cpu_cores:g} CPU, {format_size(view.limits.memory_mb << 20)}"
    labels = " ".join(f"{key}={value}" for key, value in sorted(view.labels.items()))
    state, style = view.state.value, styled(view.state.value)[1]
    if view.stop_reason:
        state = f"{state} ({view.stop_reason.value})"
    return [view.id, view.image, (state, style), age(now - view.created_at), limits, labels]


@verb
async def stop(
    sandboxes: Annotated[list[str] | None, typer.Argument(metavar="SANDBOX...")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", "-a", help="All of yours.")] = False,
    label: Labels = None,
    json: Json = False,
) -> int:
    """Stop sandboxes; returns when nothing of them is left.

    Examples:
      dsec stop sbx...

      dsec stop --all --label job=7
    """
    if every == bool(sandboxes) or (label and not every):
        raise InvalidRequest("name sandboxes, or say --all, perhaps with --label")
    async with client() as dsec:
        ids = list(sandboxes or [])
        if every:
            found = await dsec.list(labels=parsing.pairs(label or [], "label"), states=LIVE)
            ids = [view.id for view in found]
        stopped, failed = await on_each(dsec, ids, lambda sandbox: sandbox.stop())
    if json:
        print_json(stopped)
    else:
        for view in stopped:
            typer.echo(view.id)
    return report_all(failed)


@verb
async def ps(sandbox: SandboxId, *, json: Json = False) -> None:
    """List the processes in a sandbox, by the ids it sees itself."""
    async with client() as dsec:
        found = await (await dsec.get(sandbox)).processes()
    if json:
        print_json(found)
        return
    rows: list[list[Cell]] = [
        [
            str(p.pid),
            str(p.ppid),
            str(p.uid),
            p.state,
            format_size(p.rss_bytes),
            format_duration(p.cpu_s),
            " ".join(p.argv),
        ]
        for p in sorted(found, key=lambda p: p.pid)
    ]
    print_table(["PID", "PPID", "UID", "STATE", "MEMORY", "CPU TIME", "COMMAND"], rows)


@verb
async def stats(
    sandboxes: Annotated[list[str] | None, typer.Argument(metavar="[SANDBOX...]")] = None,
    *,
    json: Json = False,
) -> None:
    """Show what sandboxes use now, measured from outside; without names, all that run."""
    async with client() as dsec:
        ids = list(sandboxes or [])
        if not ids:
            ids = [view.id for view in await dsec.list(states=[SandboxState.RUNNING.value])]
        used = [(name, await (await dsec.get(name)).usage()) for name in ids]
    if json:
        print_json(dict(used))
        return
    print_table(
        ["ID", "CPU TIME", "MEMORY", "LIMIT", "PEAK", "PROCESSES", "DISK", "OOM KILLS"],
        [_usage_row(name, usage) for name, usage in used],
    )


def _usage_row(name: str, usage: Usage) -> list[Cell]:
    return [
        name,
        format_duration(usage.cpu_s),
        format_size(usage.memory_bytes),
        format_size(usage.memory_limit_bytes),
        format_size(usage.memory_peak_bytes),
        str(usage.pids),
        format_size(usage.disk_bytes),
        (str(usage.oom_kills), "red" if usage.oom_kills else ""),
    ]
