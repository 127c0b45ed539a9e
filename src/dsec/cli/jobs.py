"""Verbs about jobs: the sandboxes of one run together, and the lease that holds them."""

from __future__ import annotations

import shutil
from typing import Annotated, cast, get_args

import typer

from dsec.base.clock import SystemClock
from dsec.base.errors import DsecError, InvalidRequest, NotFound
from dsec.base.quantity import format_duration
from dsec.cli import parsing
from dsec.cli.boundary import client, verb
from dsec.cli.completing import LIVE
from dsec.cli.holding import Terms, hold
from dsec.cli.many import report_all
from dsec.cli.options import JobName, Json, Words
from dsec.cli.output import Cell, age, print_json, print_table, styled
from dsec.sdk import error_of
from dsec.wire.public_v1 import JobItem, JobView, LeasePolicy
from dsec.wire.sandbox import SandboxView

COLUMNS = ["JOB", "EPOCH", "LEASE", "ON LAPSE", "RUNNING", "PAUSED", "SANDBOXES"]


@verb
async def ls(*, json: Json = False) -> None:
    """List the jobs of your project: their leases and how many sandboxes they have.

    Example: dsec job ls
    """
    async with client() as dsec:
        found = await dsec.jobs.list()
    if json:
        print_json(found)
        return
    now = SystemClock().now()
    print_table(COLUMNS, [_row(view, now) for view in found])


def _row(view: JobView, now: float) -> list[Cell]:
    return [
        view.job,
        str(view.epoch) if view.epoch else "",
        _lease(view, now),
        view.on_lapse if view.epoch else "",
        str(view.running),
        str(view.paused),
        str(view.sandboxes),
    ]


def _lease(view: JobView, now: float) -> Cell:
    if view.lapsed:
        return "lapsed", "red"
    if view.expires_at is None:
        return "none", "dim"
    return f"{format_duration(max(view.expires_at - now, 0))} left", "green"


@verb
async def show(job: JobName, *, json: Json = False) -> None:
    """Show a job and its sandboxes.

    Example: dsec job show run-7
    """
    async with client() as dsec:
        view = await dsec.jobs.get(job)
        boxes = await dsec.list(job=job, states=LIVE)
    if json:
        print_json({"job": view, "sandboxes": boxes})
        return
    now = SystemClock().now()
    print_table(COLUMNS, [_row(view, now)])
    typer.echo()
    columns = ["ID", "STATE", "EPOCH", "STEP", "GROUP", "AGE"]
    print_table(columns, [_box_row(box, now) for box in boxes])


def _box_row(view: SandboxView, now: float) -> list[Cell]:
    epoch = str(view.epoch) if view.epoch else ""
    return [
        view.id,
        styled(view.state.value),
        epoch,
        view.step,
        view.group,
        age(now - view.created_at),
    ]


@verb
async def pause(job: JobName, *, json: Json = False) -> int:
    """Pause every sandbox of a job; print their ids as they are done.

    Example: dsec job pause run-7
    """
    return await _each("pause", job, json=json)


@verb
async def resume(job: JobName, *, json: Json = False) -> int:
    """Resume every sandbox of a job; print their ids as they are done.

    Example: dsec job resume run-7
    """
    return await _each("resume", job, json=json)


@verb
async def reap(job: JobName, *, json: Json = False) -> int:
    """Stop every sandbox of a job; print their ids as they are gone.

    Example: dsec job reap run-7
    """
    return await _each("reap", job, json=json)


async def _each(act: str, job: str, *, json: bool) -> int:
    items: list[JobItem] = []
    failed: list[DsecError] = []
    async with client() as dsec:
        async with dsec.jobs.each(act, job) as stream:
            async for item in stream:
                items.append(item)
                if item.error is not None:
                    failed.append(error_of(item.error))
                elif not json:
                    typer.echo(item.id)
    if json:
        print_json(items)
    return report_all(failed)


def _policy(text: str, option: str) -> LeasePolicy:
    return cast("LeasePolicy", parsing.one_of(get_args(LeasePolicy), text, option))


@verb
async def lease(
    job: JobName,
    words: Words = None,
    *,
    epoch: Annotated[
        int, typer.Option("--epoch", help="Renew this one; 0: take the next.", min=0)
    ] = 0,
    ttl: Annotated[str, typer.Option("--ttl", help="It lapses after, e.g. 90s, 5m.")] = "5m",
    on_lapse: Annotated[
        str, typer.Option("--on-lapse", metavar="pause|reap", help="Its sandboxes' fate then.")
    ] = "pause",
    on_superseded: Annotated[
        str,
        typer.Option("--on-superseded", metavar="pause|reap", help="That of older epochs'."),
    ] = "reap",
    held: Annotated[
        bool, typer.Option("--hold", help="Hold it while COMMAND runs here; exit as that does.")
    ] = False,
    release: Annotated[
        bool, typer.Option("--release", help="Give --epoch back: nothing lapses.")
    ] = False,
    json: Json = False,
) -> int:
    """Take a job's lease and print its epoch, or renew or release it.

    A new epoch supersedes whoever holds the job. With --hold the lease is renewed at a third of its
    time while COMMAND runs on this machine, with DSEC_JOB and DSEC_EPOCH in its environment, and
    released at the end; if it is superseded the command is ended.

    Examples:
      dsec job lease --ttl 10m run-7

      dsec job lease --hold run-7 -- python3 train.py
    """
    command = parsing.command(words or [])
    if held != bool(command):
        raise InvalidRequest("a COMMAND goes with --hold: dsec job lease --hold JOB -- COMMAND...")
    if command and shutil.which(command[0]) is None:
        # Before the lease: taking it supersedes whoever holds the job.
        raise NotFound(f"there is no program {command[0]}; no lease was taken", kind="program")
    if release and (held or not epoch):
        raise InvalidRequest("--release needs the --epoch to give back, and no --hold")
    terms = Terms(
        job=job,
        ttl_s=parsing.must_end(ttl, "--ttl"),
        on_lapse=_policy(on_lapse, "--on-lapse"),
        on_superseded=_policy(on_superseded, "--on-superseded"),
    )
    async with client() as dsec:
        if release:
            await dsec.jobs.release(job, epoch)
            return 0
        view = await terms.take(dsec, epoch)
        if held:
            return await hold(dsec, terms, view.epoch, command)
    if json:
        print_json(view)
    else:
        typer.echo(str(view.epoch))
    return 0
