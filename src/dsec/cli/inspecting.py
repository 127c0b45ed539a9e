"""Verbs that look: logs, node ls, version."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from dsec.base.errors import DsecError, NotFound
from dsec.base.quantity import format_size
from dsec.cli.attach import attach, exit_status, replay
from dsec.cli.boundary import client, verb
from dsec.cli.options import Json, SandboxId
from dsec.cli.output import Cell, note, print_json, print_table
from dsec.sdk import VERSION, DSecClient, Sandbox
from dsec.wire.public_v1 import NodeView
from dsec.wire.sandbox import CommandView, Output


@verb
async def logs(
    sandbox: SandboxId,
    command: Annotated[
        str | None, typer.Argument(metavar="[COMMAND]", help="Its id; the last one started.")
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    which: Annotated[bool, typer.Option("--list", help="List the commands instead.")] = False,
    json: Json = False,
) -> int:
    """Show what a command has said.

    Examples:
      dsec logs --list sbx...

      dsec logs -f sbx... cmd...
    """
    async with client() as dsec:
        box = await dsec.get(sandbox)
        if which or json:
            views = await box.commands()
            if json:
                print_json(views)
            else:
                columns = ["ID", "STATE", "OUTPUT", "COMMAND"]
                print_table(columns, [_command_row(view) for view in views])
            return 0
        started = await box.command(await _last(box) if command is None else command)
        if follow:
            return await attach(started, stdin=False, pty=False)
        await replay(started, _write)
        if started.view.running:
            return 0
        return exit_status(started.view)


def _write(event: Output) -> None:
    stream = sys.stdout if event.stream == "stdout" else sys.stderr
    stream.buffer.write(event.data)
    stream.buffer.flush()


async def _last(sandbox: Sandbox) -> str:
    views = await sandbox.commands()
    if not views:
        raise NotFound("no command was run in this sandbox", kind="command")
    return max(views, key=lambda view: view.started_at).command_id


def _command_row(view: CommandView) -> list[Cell]:
    state: Cell = (f"exit {view.exit_code}", "" if view.exit_code == 0 else "red")
    if view.running:
        state = ("running", "green")
    said = format_size(view.stdout_bytes + view.stderr_bytes)
    return [view.command_id, state, said, shlex.join(view.argv)]


@verb
async def nodes(*, json: Json = False) -> None:
    """List the nodes: what each can do and how full it is."""
    async with client() as dsec:
        found = await dsec.nodes()
    if json:
        print_json(found)
        return
    print_table(
        ["ID", "STATE", "BACKENDS", "SANDBOXES", "FREE MEMORY", "MEMORY", "CPUS", "VERSION"],
        [_node_row(node) for node in found],
    )
    for node in found:
        for lacking in (c for c in node.capabilities if not c.available):
            note(f"{node.id}: no {lacking.name}: {lacking.detail} {lacking.advice}".rstrip())


def _node_row(node: NodeView) -> list[Cell]:
    return [
        node.id,
        ("healthy", "green") if node.healthy else ("unhealthy", "red"),
        " ".join(node.backends),
        str(node.running + node.creating),
        format_size(node.memory_available_bytes),
        format_size(node.memory_total_bytes),
        str(node.cpus),
        node.version,
    ]


async def version(*, json: bool) -> None:
    """The versions at both ends; that nothing answers is no error here."""
    server: dict[str, str] | None = None
    dsec = DSecClient()
    try:
        answer = await dsec.version(unreachable_s=0)
        server = {"version": answer.version, "api": answer.api, "url": dsec.api_url}
    except DsecError as exc:
        if not json:
            note(f"platform: {exc.message}")
    finally:
        await dsec.close()
    if json:
        print_json({"client": VERSION, "server": server})
        return
    typer.echo(f"dsec {VERSION}")
    if server:
        typer.echo(f"platform {server['version']}, API {server['api']}, at {server['url']}")
