"""Where a verb begins and ends: the client it gets, and what its errors look like."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec

import anyio
import typer

from dsec.base.errors import (
    CapacityUnavailable,
    Conflict,
    DsecError,
    InternalError,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    SandboxGone,
    StorageFull,
    Unauthenticated,
)
from dsec.cli.output import clean
from dsec.sdk import DSecClient

P = ParamSpec("P")
INTERRUPTED = 130
PIPE_CLOSED = 141
SYSTEM = 71
_settings = {"debug": False}


class Interrupted(Exception):
    """The user gave up.

    Not KeyboardInterrupt: raised in a task, that ends asyncio's loop at once, tasks and all.
    """


def set_debug(*, debug: bool) -> None:
    """Whether errors show where they come from."""
    _settings["debug"] = debug or bool(os.environ.get("DSEC_DEBUG"))


def verb(function: Callable[P, Awaitable[int | None]]) -> Callable[P, None]:
    """An asynchronous function as a command: it runs, and its errors are a line and a status."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        async def run() -> int | None:
            return await function(*args, **kwargs)

        raise typer.Exit(guarded(lambda: anyio.run(run)))

    return command


def guarded(run: Callable[[], int | None]) -> int:
    """Run a verb to its end; the exit status, with what went wrong said on standard error."""
    try:
        status = run() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has gone; the interpreter must not stumble over it again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except BaseExceptionGroup as group:
        return report(_first(group))
    except (DsecError, OSError, Interrupted) as exc:
        return report(exc)
    return status


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def report(exc: BaseException) -> int:
    """Say what went wrong, and what to do about it; the exit status."""
    if _settings["debug"]:
        traceback.print_exception(exc)
    match exc:
        case DsecError():
            text, status = _in_options(exc), exc.exit_status
        case KeyboardInterrupt() | Interrupted():
            return INTERRUPTED
        case BrokenPipeError():
            return PIPE_CLOSED
        case OSError():
            name = f"{exc.filename}: " if exc.filename else ""
            text, status = f"{name}{exc.strerror or exc}", _status_here(exc)
        case _:
            raise exc
    first, *rest = text.rstrip().split("\n")
    sys.stderr.write(f"error: {clean(first)}\n")
    for line in [*rest, *advice(exc)]:
        sys.stderr.write(f"  {clean(line)}\n")
    return status


def _status_here(exc: OSError) -> int:
    """The status for what this machine refused: that of the like refusal by the platform."""
    match exc:
        case FileNotFoundError() | NotADirectoryError():
            return NotFound.exit_status
        case PermissionError():
            return PermissionDenied.exit_status
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return StorageFull.exit_status
        case _:
            return SYSTEM


_OPTIONS = {
    "limits.memory_mb": "--memory",
    "limits.cpu_cores": "--cpus",
    "limits.pids": "--pids",
    "limits.disk_mb": "--disk-mb",
    "workspace": "--workspace",
    "toolkits": "--toolkit",
    "toolkits[...]": "--toolkit",
    "trace": "--trace",
    "ttl_running_stop": "--ttl",
    "max_lifetime_s": "--lifetime",
    "timeout_s": "--timeout",
    "hostname": "--hostname",
    "backend": "--backend",
    "idle_action": "--idle",
    "qos": "--qos",
    "job": "--job",
    "step": "--step",
    "group": "--group",
    "memory_mb": "--memory",
    "cpu_cores": "--cpus",
    "pids": "--pids",
    "disk_mb": "--disk-mb",
    "exclude": "--exclude",
    "exclude[...]": "--exclude",
    "description": "--description",
    "count": "--count",
    "op": "--op",
    "ttl_s": "--ttl",
    "init_user": "--user",
    "workdir": "--workdir",
    "cwd": "--workdir",
    "suite": "--suite",
    "packages": "--package",
    "packages[...]": "--package",
}


def _in_options(exc: DsecError) -> str:
    """The message, with a field of the request by the name of the option it came from."""
    place = exc.details.get("place")
    # Of one that is created as of one of many, and as of one that is resized.
    option = _OPTIONS.get(place.removeprefix("spec.")) if isinstance(place, str) else None
    return f"{option}: {exc.message.rpartition(f'{place}: ')[2]}" if option else exc.message


_ADVICE: list[tuple[type[DsecError], dict[str, str], str]] = [
    (
        Unauthenticated,
        {},
        "set DSEC_API_KEY, or start your own platform with `dsec up`",
    ),
    (NotFound, {"kind": "sandbox"}, "`dsec ls --all` shows what became of it"),
    (SandboxGone, {}, "`dsec ls --all` shows what became of it"),
    (
        NotFound,
        {"kind": "image"},
        "`dsec image ls` shows what there is; `dsec image pull` brings more",
    ),
    *(
        (NotFound, {"kind": kind}, "`dsec layer ls` shows what there is")
        for kind in ("layer", "workspace", "toolkit")
    ),
    (
        CapacityUnavailable,
        {},
        "`dsec node ls` shows how full it is; `dsec stop` makes room",
    ),
    (Conflict, {"kind": "held"}, "`dsec resume` has it go on all the same"),
    (NotFound, {"kind": "snapshot"}, "`dsec snapshot ls` shows what there is"),
    (NotFound, {"kind": "job"}, "`dsec job ls` shows what there is"),
    (QuotaExceeded, {}, "`dsec ls` shows what counts; `dsec stop` makes room"),
    (StorageFull, {}, "`dsec image rm` and `dsec stop` make room"),
    (InternalError, {}, "this is a bug; the server's log says more"),
]


def advice(exc: BaseException) -> list[str]:
    """What may help: what the platform says, else what is known of such errors."""
    if isinstance(exc, DsecError) and (said := exc.details.get("advice")):
        return [str(said)]
    return [
        text
        for kind, details, text in _ADVICE
        if isinstance(exc, kind) and details.items() <= exc.details.items()
    ]


@asynccontextmanager
async def client() -> AsyncIterator[DSecClient]:
    """A client. A platform that does not answer at first is reported at once: somebody waits."""
    dsec = DSecClient()
    try:
        yield await dsec.open(unreachable_s=0)
    finally:
        await dsec.close()
