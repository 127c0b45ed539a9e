"""Verbs about layers: workspaces and toolkits."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer

from dsec.base.clock import SystemClock
from dsec.base.errors import InvalidRequest
from dsec.base.quantity import format_size
from dsec.cli import parsing
from dsec.cli.boundary import client, verb
from dsec.cli.copying import place
from dsec.cli.options import Json
from dsec.cli.output import Cell, age, clean, print_json, print_table
from dsec.cli.progress import follow
from dsec.sdk import GitTree, SandboxTree
from dsec.sdk.sources import History, Source
from dsec.wire.public_v1 import LayerView


class Kind(StrEnum):
    """What a layer is for."""

    workspace = "workspace"
    toolkit = "toolkit"


HISTORIES = ("commit", "none")
OfKind = Annotated[Kind, typer.Argument(metavar="KIND", help="workspace or toolkit.")]
Name = Annotated[str, typer.Argument(metavar="NAME[:VERSION]")]


@verb
async def publish(
    kind: OfKind,
    name: Name,
    source: Annotated[
        Path | None, typer.Argument(help="Directory or tar file on this machine.")
    ] = None,
    *,
    git: Annotated[
        str | None, typer.Option("--git", metavar="URL_OR_PATH", help="A git repository instead.")
    ] = None,
    commit: Annotated[str, typer.Option("--commit", help="Which commit of it.")] = "HEAD",
    history: Annotated[
        str | None,
        typer.Option(
            "--history", help="commit: a .git with that commit alone (workspaces); none: no .git."
        ),
    ] = None,
    branch: Annotated[
        str | None, typer.Option("--branch", help="Check it out as this branch.")
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option("--from-sandbox", metavar="SANDBOX:PATH", help="A sandbox's directory."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", help="Where it goes: /workspace for a workspace, / for a toolkit."),
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="UID:GID", help="Of all of it; or keep.")
    ] = None,
    description: Annotated[str, typer.Option("--description", help="A line for people.")] = "",
    json: Json = False,
) -> None:
    """Publish a version of a workspace or toolkit; without a version it gets the next v1, v2, ...

    A version never changes: publish another. Nothing is rebuilt, also not the environments that use
    the one before.

    Examples:
      dsec layer publish toolkit ripgrep:14.1 ./ripgrep --at /opt/ripgrep

      dsec layer publish workspace sphinx-9658 --git https://host/sphinx.git --commit 3f1c...

      dsec layer publish workspace prepared --from-sandbox sbx...:/workspace
    """
    tree = None if git is None else _git_tree(git, commit, history, branch)
    if tree is None and (commit != "HEAD" or history or branch):
        raise InvalidRequest("--commit, --history and --branch need --git")
    given = [one for one in (source, tree, _sandbox_tree(sandbox)) if one is not None]
    if len(given) != 1:
        raise InvalidRequest("name one source: a path, --git, or --from-sandbox")
    chosen: Source = given[0]
    async with client() as dsec:
        events = dsec.layers.publish(
            kind.value, name, chosen, at=at, description=description, owner=owner
        )
        layer = (await follow(events)).layer
    if json:
        print_json(layer)
    else:
        typer.echo(clean(layer.name))


def _git_tree(repository: str, commit: str, history: str | None, branch: str | None) -> GitTree:
    if history is not None:
        parsing.one_of(HISTORIES, history, "--history")
    return GitTree(repository, commit, cast("History | None", history), branch)


def _sandbox_tree(text: str | None) -> SandboxTree | None:
    if text is None:
        return None
    where = place(text)
    if where.sandbox is None or not where.path.startswith("/"):
        raise InvalidRequest(f"--from-sandbox {text!r} must be SANDBOX:/PATH")
    return SandboxTree(where.sandbox, where.path)


@verb
async def ls(
    kind: Annotated[
        Kind | None, typer.Argument(metavar="[KIND]", help="workspace or toolkit.")
    ] = None,
    *,
    json: Json = False,
) -> None:
    """List the workspaces and toolkits there are, of each name the newest version last."""
    async with client() as dsec:
        found = await dsec.layers.list(kind.value if kind else None)
    if json:
        print_json(found)
        return
    now = SystemClock().now()
    print_table(
        ["KIND", "NAME", "DIGEST", "FILES", "SIZE", "AGE", "IN USE", "DESCRIPTION"],
        [_row(layer, now) for layer in found],
    )


def _row(layer: LayerView, now: float) -> list[Cell]:
    return [
        layer.kind,
        layer.name,
        layer.digest.removeprefix("sha256:")[:12],
        str(layer.entries),
        format_size(layer.size_bytes),
        age(now - layer.created_at) if layer.created_at else "",
        str(layer.used_by),
        layer.description,
    ]


@verb
async def show(kind: OfKind, name: Name, *, json: Json = False) -> None:
    """Show a version of a layer; without one, the newest."""
    async with client() as dsec:
        layer = await dsec.layers.get(kind.value, name)
    if json:
        print_json(layer)
        return
    lines = {
        layer.kind: layer.name,
        "digest": layer.digest,
        "files": f"{layer.entries}, {format_size(layer.size_bytes)}",
        "age": age(SystemClock().now() - layer.created_at) if layer.created_at else "",
        "source": layer.source,
        "description": layer.description,
        "in use": f"by {layer.used_by} sandboxes",
    }
    for label, value in lines.items():
        if value:
            typer.echo(f"{label:<12} {clean(value)}")


@verb
async def rm(
    kind: OfKind,
    names: Annotated[list[str], typer.Argument(metavar="NAME:VERSION...")],
) -> None:
    """Remove versions of a layer. One that a sandbox uses stays, until that has stopped."""
    for name in names:
        if ":" not in name.rpartition("/")[2]:
            raise InvalidRequest(f"say which version of {name}: `dsec layer ls` shows them")
    async with client() as dsec:
        for name in names:
            await dsec.layers.remove(kind.value, name)
            typer.echo(clean(name))
