"""The verb about the parts of a sandbox's life: phase."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli.boundary import client, verb
from dsec.cli.options import Json, SandboxId
from dsec.cli.output import print_json

Name = Annotated[str, typer.Argument(help="One of its phases.", metavar="NAME")]


@verb
async def enter(sandbox: SandboxId, name: Name, *, json: Json = False) -> None:
    """Have a sandbox enter another of its phases. What runs in it may be ended.

    Example: dsec phase sbx... verify
    """
    async with client() as dsec:
        view = await (await dsec.get(sandbox)).enter_phase(name)
    if json:
        print_json(view)
    else:
        typer.echo(view.phase)
