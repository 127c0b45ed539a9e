"""Verbs that run something: run, exec, shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, cast, get_args

import typer

from dsec.base.errors import InvalidRequest, NotFound
from dsec.cli import parsing
from dsec.cli.attach import Detached, attach, need_terminal, terminal_size
from dsec.cli.boundary import client, verb
from dsec.cli.options import (
    Allow,
    Deny,
    Env,
    Group,
    Idle,
    Interactive,
    Job,
    Json,
    Labels,
    Lifetime,
    Memory,
    Qos,
    SandboxId,
    SecurityProfile,
    Step,
    Timeout,
    Toolkits,
    TraceName,
    Ttl,
    Tty,
    User,
    Words,
    Workdir,
    Workspace,
)
from dsec.cli.output import note, print_json
from dsec.sdk import Command, DSecContainerRunArgs, Sandbox
from dsec.wire.sandbox import Backend, PtySize, Security

LONGEST_S = parsing.LONGEST_S
SHELLS = ("bash", "sh")
"""Tried in turn: what an image has differs."""


@verb
async def run(
    image: Annotated[str, typer.Argument(help="Image to start from.")],
    words: Words = None,
    *,
    rm: Annotated[bool, typer.Option("--rm", help="Stop it when the command ends.")] = False,
    entrypoint: Annotated[
        bool,
        typer.Option("--entrypoint", help="Run the image's own program; words are its arguments."),
    ] = False,
    stdin: Interactive = False,
    tty: Tty = False,
    workspace: Workspace = None,
    toolkit: Toolkits = None,
    memory: Memory = "2G",
    cpus: Annotated[float, typer.Option("--cpus", "-c", help="Cores.")] = 1.0,
    pids: Annotated[int, typer.Option("--pids", help="Processes at once.")] = 1024,
    disk_mb: Annotated[
        int | None, typer.Option("--disk-mb", help="What it may write, MiB.")
    ] = None,
    env: Env = None,
    label: Labels = None,
    ttl: Ttl = "30m",
    idle: Idle = "stop",
    lifetime: Lifetime = "24h",
    qos: Qos = "ls",
    job: Job = None,
    step: Step = "",
    group: Group = "",
    user: User = None,
    workdir: Workdir = None,
    hostname: Annotated[str | None, typer.Option("--hostname", help="Its host name.")] = None,
    allow: Allow = None,
    deny: Deny = None,
    network: Annotated[
        bool, typer.Option("--network", help="A network, though no rule allows anything yet.")
    ] = False,
    backend: Annotated[str, typer.Option(help="How it is isolated.")] = "container",
    security: SecurityProfile = "default",
    trace: TraceName = None,
    record_trace: Annotated[
        bool, typer.Option("--record-trace", help="Record what it reads, for the next creation.")
    ] = False,
    wait: Annotated[str, typer.Option("--wait", help="How long to wait for the start.")] = "2m",
    timeout: Timeout = None,
    json: Json = False,
) -> int:
    """Start a sandbox, and run a command in it.

    Without a command, print its id: it waits for `dsec exec`. With one, exit as the command does; the
    sandbox goes on for more, until its idle time, unless --rm.

    Examples:
      dsec run debian

      dsec run --rm -m 4G -e CI=1 debian -- sh -c 'make && make test'

      dsec run --rm -it debian -- bash

      dsec run --workspace sphinx-9658 --toolkit agent:v3 debian

      dsec run --allow pypi --allow '*.example.org:443' debian

    What a rule may be: dsec network set --help.
    """
    command = parsing.command(words or [])
    if not command and not entrypoint and (rm or stdin or tty or timeout is not None):
        raise InvalidRequest("--rm, -i, -t and --timeout need a command")
    if tty:
        need_terminal()
    args = DSecContainerRunArgs(
        container_image=image,
        workspace=workspace,
        toolkits=toolkit or [],
        memory_limit_mb=parsing.memory_mb(memory),
        cpu_cores_limit=parsing.cores(cpus),
        pids_limit=pids,
        disk_limit_mb=disk_mb,
        ttl_running_stop=parsing.seconds(ttl),
        max_lifetime_s=parsing.seconds(lifetime),
        network_rules=parsing.network(allow or [], deny or []),
        network=network,
        init_user=user,
        workdir=workdir,
        env=parsing.environment(env or []),
        hostname=hostname,
        labels=parsing.pairs(label or [], "label"),
        trace=trace,
        record_trace=record_trace,
        backend=cast("Backend", parsing.one_of(get_args(Backend), backend, "--backend")),
        idle_action=parsing.idle_action(idle),
        qos=parsing.qos_class(qos),
        job=job,
        step=step,
        group=group,
        security=Security(profile=parsing.security_profile(security)),
    )
    async with client() as dsec:
        sandbox = await dsec.run_container(args, timeout=parsing.at_most(wait))
        for warning in sandbox.warnings:
            note(f"warning: {warning}")
        if not command and not entrypoint:
            if json:
                print_json(sandbox.view)
            else:
                typer.echo(sandbox.id)
            return 0
        if rm:
            async with sandbox:
                return await _execute(
                    sandbox, command, stdin, tty, timeout=timeout, entrypoint=entrypoint
                )
        note(f"sandbox {sandbox.id}")
        return await _execute(sandbox, command, stdin, tty, timeout=timeout, entrypoint=entrypoint)


@verb
async def execute(
    sandbox: SandboxId,
    words: Words = None,
    *,
    stdin: Interactive = False,
    tty: Tty = False,
    user: User = None,
    workdir: Workdir = None,
    env: Env = None,
    timeout: Timeout = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print its id, go on.")] = False,
) -> int:
    """Run a command in a sandbox; exit as it does.

    Examples:
      dsec exec sbx... -- ls -l /

      tar c src | dsec exec -i sbx... -- tar x -C /repo

      dsec exec -it -u root sbx... -- top
    """
    command = parsing.command(words or [])
    if not command:
        raise InvalidRequest("say what to run: dsec exec SANDBOX -- COMMAND...")
    if tty:
        need_terminal()
    async with client() as dsec:
        box = await dsec.get(sandbox)
        if detach:
            started = await box.start(
                command,
                user=user,
                cwd=workdir,
                env=parsing.environment(env or []),
                timeout=None if timeout is None else parsing.at_most(timeout),
            )
            typer.echo(started.id)
            return 0
        return await _execute(
            box, command, stdin, tty, user=user, workdir=workdir, env=env, timeout=timeout
        )


@verb
async def shell(
    sandbox: SandboxId,
    *,
    user: User = None,
    workdir: Workdir = None,
    env: Env = None,
    program: Annotated[
        str | None, typer.Option("--shell", help="Which shell; bash if it has it, else sh.")
    ] = None,
    command: Annotated[
        str | None, typer.Option("--attach", metavar="COMMAND", help="Go back to a shell left.")
    ] = None,
) -> int:
    """Open a shell in a sandbox.

    It survives a lost connection. Type ~. at the start of a line to leave it running; it says how to
    come back.

    Examples:
      dsec shell sbx...

      dsec shell -u nobody -w /tmp sbx...
    """
    need_terminal()
    async with client() as dsec:
        box = await dsec.get(sandbox)
        size = terminal_size()
        if command is not None:
            started = await box.command(command)
            await started.resize(size.rows, size.cols)
        else:
            variables = _terminal_env() | parsing.environment(env or [])
            started = await _start_shell(
                box, program, user=user, cwd=workdir, env=variables, size=size
            )
        try:
            return await attach(started, stdin=True, pty=True)
        except Detached:
            note(f"\nleft; back with: dsec shell {box.id} --attach {started.id}".lstrip("\n"))
            return 0


async def _start_shell(
    sandbox: Sandbox,
    program: str | None,
    *,
    user: str | None,
    cwd: str | None,
    env: dict[str, str],
    size: PtySize,
) -> Command:
    candidates = (program,) if program else SHELLS
    for name in candidates[:-1]:
        with suppress(NotFound):
            return await sandbox.start(
                [name, "-l"], pty=size, user=user, cwd=cwd, env=env, timeout=LONGEST_S
            )
    return await sandbox.start(
        [candidates[-1], "-l"], pty=size, user=user, cwd=cwd, env=env, timeout=LONGEST_S
    )


async def _execute(
    sandbox: Sandbox,
    command: Sequence[str],
    stdin: bool,
    tty: bool,
    *,
    user: str | None = None,
    workdir: str | None = None,
    env: Sequence[str] | None = None,
    timeout: str | None = None,
    entrypoint: bool = False,
) -> int:
    given = parsing.environment(env or [])
    started = await sandbox.start(
        command or None,
        entrypoint=entrypoint,
        stdin="pipe" if stdin else "null",
        pty=terminal_size() if tty else None,
        user=user,
        cwd=workdir,
        env=_terminal_env() | given if tty else given,
        timeout=(LONGEST_S if tty else None) if timeout is None else parsing.at_most(timeout),
    )
    try:
        return await attach(started, stdin=stdin, pty=tty)
    except Detached:
        note(f"left; back with: dsec shell {sandbox.id} --attach {started.id}")
        return 0


def _terminal_env() -> dict[str, str]:
    return {"TERM": os.environ.get("TERM", "xterm-256color")}
