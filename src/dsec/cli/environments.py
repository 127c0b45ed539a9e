"""Verbs about environments: lint, trace, stat."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dsec.base.errors import InvalidRequest
from dsec.cli import lint_report, parsing, trace_picture
from dsec.cli.attach import exit_status
from dsec.cli.boundary import client, verb
from dsec.cli.options import Json, Memory, Toolkits, TraceName, User, Words, Workdir, Workspace
from dsec.cli.output import note, print_json
from dsec.sdk import Command, DSecContainerRunArgs, Sandbox
from dsec.wire.public_v1 import LintReport, LintRule, TraceView
from dsec.wire.sandbox import Output

if TYPE_CHECKING:
    from rich.console import RenderableType

SEVERITIES = ("error", "warning", "advice")
NEVER = "never"
FOUND = 1
WIDE = 1000
Image = Annotated[str, typer.Argument(help="Image of the environment.")]
Picture = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE.svg", help="Draw bytes over time into this file."),
]
Files = Annotated[int, typer.Option("--files", min=0, help="How many files to show.")]


class RulesFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file of rules: `[[rule]]` tables."""

    rule: list[LintRule]


@verb
async def lint(
    image: Image,
    *,
    workspace: Workspace = None,
    toolkit: Toolkits = None,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="Texts that must not be found, one a line."),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE.toml", help="Rules of your own.")
    ] = None,
    disable: Annotated[
        list[str] | None, typer.Option("--disable", metavar="ID", help="Rule to leave out.")
    ] = None,
    fail_on: Annotated[
        str, typer.Option("--fail-on", help="error, warning, advice; or never.")
    ] = "error",
    json: Json = False,
) -> int:
    """Look an environment over for what spoils an evaluation.

    The exit status is 1 if something at least as bad as --fail-on was found.

    Examples:
      dsec env lint debian --workspace sphinx-9658 --answers solution.patch

      dsec env lint debian --toolkit agent --rules ours.toml --fail-on warning --json
    """
    parsing.one_of((*SEVERITIES, NEVER), fail_on, "--fail-on")
    texts = _lines(answers) if answers else []
    own = _rules(rules) if rules else []
    async with client() as dsec:
        report = await dsec.environments.lint(
            image,
            workspace=workspace,
            toolkits=toolkit or [],
            answers=texts,
            rules=own,
            disabled=disable or [],
        )
    if json:
        print_json(report)
    else:
        _print(lint_report.table(report))
    return FOUND if _fails(report, fail_on) else 0


def _fails(report: LintReport, threshold: str) -> bool:
    if threshold == NEVER:
        return False
    bad = SEVERITIES[: SEVERITIES.index(threshold) + 1]
    return any(finding.severity in bad for finding in report.findings)


def _lines(path: Path) -> list[str]:
    lines = path.read_text("utf-8", "replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _rules(path: Path) -> list[LintRule]:
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), RulesFile).rule
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as exc:
        raise InvalidRequest(f"{path}: {exc}") from None


@verb
async def trace(
    image: Image,
    words: Words = None,
    *,
    workspace: Workspace = None,
    toolkit: Toolkits = None,
    name: TraceName = None,
    memory: Memory = "2G",
    user: User = None,
    workdir: Workdir = None,
    picture: Picture = None,
    files: Files = 20,
    json: Json = False,
) -> int:
    """Run a command in a fresh sandbox, and record and show what it reads of its environment.

    The trace is kept: the next creation loads what is in it ahead. What the command says goes to
    standard error. Exit as it does.

    Examples:
      dsec env trace debian -- python3 -c 'print(1)'

      dsec env trace --workspace sphinx-9658 --trace sphinx-9658 debian -- make test
    """
    command = parsing.command(words or [])
    if not command:
        raise InvalidRequest("say what to run: dsec env trace IMAGE -- COMMAND...")
    args = DSecContainerRunArgs(
        image,
        workspace=workspace,
        toolkits=toolkit or [],
        trace=name,
        record_trace=True,
        memory_limit_mb=parsing.memory_mb(memory),
        init_user=user,
        workdir=workdir,
    )
    async with client() as dsec:
        async with await dsec.run_container(args) as sandbox:
            # As it was composed: a newer version may be published meanwhile.
            made = sandbox.view
            status = await _run(sandbox, command)
        view = await dsec.environments.trace(
            image,
            workspace=made.workspace or workspace,
            toolkits=made.toolkits or toolkit or [],
            trace=name or "",
        )
    _show(view, picture, files, json=json)
    return status


async def _run(sandbox: Sandbox, command: Sequence[str]) -> int:
    for warning in sandbox.warnings:
        note(f"warning: {warning}")
    started: Command = await sandbox.start(command)
    async with started.events() as events:
        async for event in events:
            if isinstance(event, Output):
                sys.stderr.flush()
                sys.stderr.buffer.write(event.data)
                sys.stderr.flush()
    return exit_status(await started.refresh())


@verb
async def stat(
    image: Image,
    *,
    workspace: Workspace = None,
    toolkit: Toolkits = None,
    name: TraceName = None,
    picture: Picture = None,
    files: Files = 20,
    json: Json = False,
) -> None:
    """Show what the recorded run read of an environment: by part, by file, over time.

    Example: dsec env stat debian --trace sphinx-9658 --picture reads.svg
    """
    async with client() as dsec:
        view = await dsec.environments.trace(
            image, workspace=workspace, toolkits=toolkit or [], trace=name or ""
        )
    _show(view, picture, files, json=json)


def _show(view: TraceView, picture: Path | None, files: int, *, json: bool) -> None:
    if picture is not None:
        picture.write_text(trace_picture.svg(view))
        note(f"drawn: {picture}")
    if json:
        print_json(view)
    else:
        _print(trace_picture.table(view, files))


def _print(shown: RenderableType) -> None:
    from rich.console import Console  # here: only who looks needs it

    # Whole lines where nobody looks: what is cut there is lost.
    Console(width=None if sys.stdout.isatty() else WIDE, soft_wrap=False).print(shown)
