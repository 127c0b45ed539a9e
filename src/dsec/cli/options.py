"""Options several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli import completing

COMMAND_CONTEXT = {
    "allow_interspersed_args": False,
    "ignore_unknown_options": False,
    "help_option_names": ["-h", "--help"],
}
"""Everything after the first argument belongs to the command to run."""

Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
SandboxId = Annotated[
    str,
    typer.Argument(metavar="SANDBOX", help="Id of a sandbox.", autocompletion=completing.sandboxes),
]
SandboxIds = Annotated[
    list[str],
    typer.Argument(
        metavar="SANDBOX...", help="Ids of sandboxes.", autocompletion=completing.sandboxes
    ),
]
SnapshotName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of a snapshot.", autocompletion=completing.snapshots),
]
JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="Name of a job.", autocompletion=completing.jobs)
]
Job = Annotated[
    str | None,
    typer.Option("--job", help="Job it belongs to; else DSEC_JOB.", autocompletion=completing.jobs),
]
Step = Annotated[str, typer.Option("--step", help="Step of the job, a word of yours.")]
Group = Annotated[str, typer.Option("--group", help="Group of the step, a word of yours.")]
Ttl = Annotated[str, typer.Option("--ttl", help="Stop after idle time; none: never.")]
Lifetime = Annotated[str, typer.Option("--lifetime", help="Stop at this age.")]
Idle = Annotated[
    str, typer.Option("--idle", metavar="stop|pause", help="What --ttl does, when it has passed.")
]
Qos = Annotated[
    str,
    typer.Option(
        "--qos", metavar="ls|be", help="Latency-sensitive, or best-effort: gets the rest."
    ),
]
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
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="RULE",
        help="What it may reach, e.g. pypi, '*.example.org:443', tcp://10.0.0.0/8; repeatable.",
        autocompletion=completing.rules,
    ),
]
Deny = Annotated[
    list[str] | None,
    typer.Option(
        "--deny",
        metavar="RULE",
        help="What of that it may not; the more specific rule decides. Repeatable.",
        autocompletion=completing.rules,
    ),
]
SecurityProfile = Annotated[
    str,
    typer.Option(
        "--security", metavar="PROFILE", help="Of the kernel it may use: default, strict or loose."
    ),
]
Memory = Annotated[str, typer.Option("--memory", "-m", help="E.g. 512M, 4G.")]
