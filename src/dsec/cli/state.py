"""Verbs about a sandbox's state: pause, resume, resize, pack, diff, fork, restore."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated

import typer

from dsec.base.errors import DsecError, InvalidRequest
from dsec.base.quantity import format_size
from dsec.cli import parsing
from dsec.cli.boundary import client, verb
from dsec.cli.many import on_each, report_all
from dsec.cli.options import (
    Env,
    Group,
    Idle,
    Job,
    Json,
    Labels,
    Lifetime,
    Qos,
    SandboxId,
    SandboxIds,
    SnapshotName,
    Step,
    Ttl,
)
from dsec.cli.output import Cell, clean, note, print_json, print_table
from dsec.cli.progress import counting, waiting
from dsec.sdk import DSecContainerRunArgs, Sandbox
from dsec.wire.sandbox import DiffEntry, SandboxView, SnapshotView

CHANGES = {"added": "green", "modified": "yellow", "removed": "red"}
Count = Annotated[int, typer.Option("--count", "-n", help="How many.", min=1, max=1000)]


@verb
async def pause(sandboxes: SandboxIds, *, json: Json = False) -> int:
    """Freeze sandboxes and take back their memory. What is asked of one next resumes it.

    Example: dsec pause sbx...
    """
    return await _turn(sandboxes, "pause", json=json)


@verb
async def resume(sandboxes: SandboxIds, *, json: Json = False) -> int:
    """Have paused sandboxes go on.

    Example: dsec resume sbx...
    """
    return await _turn(sandboxes, "resume", json=json)


async def _turn(ids: list[str], act: str, *, json: bool) -> int:
    async def turn(sandbox: Sandbox) -> SandboxView:
        view = await (sandbox.pause() if act == "pause" else sandbox.resume())
        if not json:
            typer.echo(view.id)
            _say_pause(view)
        return view

    async with client() as dsec:
        done, failed = await on_each(dsec, ids, turn)
    if json:
        print_json(done)
    return report_all(failed)


def _say_pause(view: SandboxView) -> None:
    if view.pause is None:
        return
    before, after = view.pause.memory_before_bytes, view.pause.memory_after_bytes
    note(f"{view.id}: {format_size(before)} of memory before, {format_size(after)} now")
    if view.pause.detail:
        note(f"{view.id}: {view.pause.detail}")


@verb
async def resize(
    sandbox: SandboxId,
    *,
    memory: Annotated[str | None, typer.Option("--memory", "-m", help="E.g. 512M, 4G.")] = None,
    cpus: Annotated[float | None, typer.Option("--cpus", "-c", help="Cores.")] = None,
    pids: Annotated[int | None, typer.Option("--pids", help="Processes at once.")] = None,
    disk_mb: Annotated[
        int | None, typer.Option("--disk-mb", help="What it may write, MiB; only upwards.")
    ] = None,
    qos: Annotated[
        str | None, typer.Option("--qos", help="ls: latency-sensitive; be: best-effort.")
    ] = None,
    json: Json = False,
) -> None:
    """Give a sandbox other limits while it runs; what is not named stays.

    Example: dsec resize -m 4G -c 2 sbx...
    """
    if all(value is None for value in (memory, cpus, pids, disk_mb, qos)):
        raise InvalidRequest("say what changes: --memory, --cpus, --pids, --disk-mb or --qos")
    async with client() as dsec:
        view = await (await dsec.get(sandbox)).resize(
            memory_mb=None if memory is None else parsing.memory_mb(memory),
            cpu_cores=None if cpus is None else parsing.cores(cpus),
            pids=pids,
            disk_mb=disk_mb,
            qos=None if qos is None else parsing.qos_class(qos),
        )
    if json:
        print_json(view)
    else:
        typer.echo(view.id)


@verb
async def pack(
    sandbox: SandboxId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the snapshot.")],
    *,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Absolute paths left out; repeatable."),
    ] = None,
    no_clean: Annotated[
        bool,
        typer.Option("--no-clean", help="Keep caches, histories, logs and keys: for you alone."),
    ] = False,
    description: Annotated[str, typer.Option("--description", help="A line for people.")] = "",
    json: Json = False,
) -> None:
    """Take a snapshot of what a sandbox has written, running or paused.

    Examples:
      dsec pack sbx... built

      dsec pack sbx... built --exclude '/root/build/**' --description 'gcc, make done'
    """
    async with client() as dsec:
        box = await dsec.get(sandbox)
        with waiting(f"packing {box.id}"):
            view = await box.pack(
                name, exclude=exclude or [], clean=not no_clean, description=description
            )
    if json:
        print_json(view)
        return
    note(_packed(view))
    typer.echo(clean(view.name))


def _packed(view: SnapshotView) -> str:
    left = f", {view.left_out} left out" if view.left_out else ""
    return (
        f"{view.entries} entries, {format_size(view.size_bytes)}{left}; "
        f"it stood still for {view.frozen_ms:.0f} ms"
    )


@verb
async def diff(sandbox: SandboxId, *, json: Json = False) -> None:
    """List the files a sandbox has added, modified and removed so far; sizes are of the files.

    Example: dsec diff sbx...
    """
    async with client() as dsec:
        found = await (await dsec.get(sandbox)).diff()
    show_diff(found, json=json)


def show_diff(entries: list[DiffEntry], *, json: bool) -> None:
    """Changed files, by path."""
    if json:
        print_json(entries)
        return
    rows = [_diff_row(entry) for entry in entries]
    print_table(["CHANGE", "KIND", "MODE", "SIZE", "PATH"], rows)


def _diff_row(entry: DiffEntry) -> list[Cell]:
    path = entry.path_b64.decode("utf-8", "surrogateescape") if entry.path_b64 else entry.path
    gone = entry.change == "removed"
    return [
        (entry.change, CHANGES[entry.change]),
        entry.kind,
        "" if gone else f"{entry.mode:o}",
        format_size(entry.size_bytes) if entry.kind == "file" and not gone else "",
        path,
    ]


@verb
async def fork(
    sandbox: SandboxId,
    *,
    count: Count = 1,
    label: Labels = None,
    key: Annotated[str, typer.Option("--key", help="The same key gives the same children.")] = "",
    json: Json = False,
) -> int:
    """Make sandboxes that begin where one stands: its files at one moment, none of its processes.

    Examples:
      dsec fork sbx...

      dsec fork -n 16 -l try=7 sbx...
    """
    labels = None if label is None else parsing.pairs(label, "label")
    async with client() as dsec:
        box = await dsec.get(sandbox)
        with counting(f"forking {box.id}", count) as advance:
            async with box.forks(count, labels=labels, key=key) as forks:
                made, failed = await _sorted(forks, advance)
    return _made(made, failed, json=json)


async def _sorted(
    children: AsyncIterator[Sandbox | DsecError], advance: Callable[[], None]
) -> tuple[list[SandboxView], list[DsecError]]:
    """Those that were made and those that failed, once all are known."""
    made: list[SandboxView] = []
    failed: list[DsecError] = []
    async for child in children:
        advance()
        if isinstance(child, Sandbox):
            made.append(child.view)
        else:
            failed.append(child)
    return made, failed


def _made(views: list[SandboxView], failed: list[DsecError], *, json: bool) -> int:
    for view in views:
        for warning in view.warnings:
            note(f"warning: {view.id}: {warning}")
    if json:
        print_json(views)
    else:
        for view in views:
            typer.echo(view.id)
    return report_all(failed)


@verb
async def restore(
    name: SnapshotName,
    *,
    count: Count = 1,
    memory: Annotated[str, typer.Option("--memory", "-m", help="E.g. 512M, 4G.")] = "2G",
    cpus: Annotated[float, typer.Option("--cpus", "-c", help="Cores.")] = 1.0,
    env: Env = None,
    label: Labels = None,
    ttl: Ttl = "30m",
    lifetime: Lifetime = "24h",
    idle: Idle = "stop",
    qos: Qos = "ls",
    job: Job = None,
    step: Step = "",
    group: Group = "",
    wait: Annotated[str, typer.Option("--wait", help="How long to wait for the start.")] = "2m",
    json: Json = False,
) -> int:
    """Start sandboxes with the files of a snapshot; print their ids.

    Examples:
      dsec restore built

      dsec restore built -n 8 -m 4G -l try=7
    """
    async with client() as dsec:
        args = DSecContainerRunArgs(
            container_image=(await dsec.snapshots.get(name)).image,
            memory_limit_mb=parsing.memory_mb(memory),
            cpu_cores_limit=parsing.cores(cpus),
            env=parsing.environment(env or []),
            labels=parsing.pairs(label or [], "label"),
            ttl_running_stop=parsing.seconds(ttl),
            max_lifetime_s=parsing.seconds(lifetime),
            idle_action=parsing.idle_action(idle),
            qos=parsing.qos_class(qos),
            job=job,
            step=step,
            group=group,
        )
        limit = parsing.at_most(wait)
        with counting(f"restoring {name}", count) as advance:
            async with dsec.run_containers(args, count, limit) as batch:
                made, failed = await _sorted(batch, advance)
    return _made(made, failed, json=json)
