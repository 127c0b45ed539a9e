"""Options several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

COMMAND_CONTEXT = {
    "allow_interspersed_args": False,
    "ignore_unknown_options": False,
    "help_option_names": ["-h", "--help"],
}
"""Everything after the first argument belongs to the command to run."""

Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
SandboxId = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a sandbox.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[--] COMMAND...", help="What to run.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="Repeatable.")
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="KEY[=VALUE]", help="Variable; repeatable."),
]
User = Annotated[str | None, typer.Option("--user", "-u", help="Who runs it in the sandbox.")]
Workdir = Annotated[str | None, typer.Option("--workdir", "-w", help="Directory to run it in.")]
Interactive = Annotated[bool, typer.Option("-i", "--stdin", help="Send it our standard input.")]
Tty = Annotated[bool, typer.Option("-t", "--tty", help="Give it a terminal.")]
Timeout = Annotated[
    str | None, typer.Option("--timeout", metavar="TIME", help="Kill it after, e.g. 90s, 5m.")
]
Workspace = Annotated[
    str | None,
    typer.Option("--workspace", metavar="NAME[:VERSION]", help="Workspace laid over the image."),
]
Toolkits = Annotated[
    list[str] | None,
    typer.Option("--toolkit", metavar="NAME[:VERSION]", help="Toolkit laid over that; repeatable."),
]
TraceName = Annotated[
    str | None,
    typer.Option("--trace", metavar="NAME", help="Name of the trace, e.g. the task's."),
]
Memory = Annotated[str, typer.Option("--memory", "-m", help="E.g. 512M, 4G.")]
