"""A server in the background: fork before anything runs, wait until it serves or has failed."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dsec.base.errors import DsecError, InternalError, StorageFull, Unavailable, error_from

READY = b"+"


def in_background(run: Callable[[Callable[[str], None]], None], log_file: Path) -> str:
    """Run a server in a process of its own.

    Call it before there are threads or an event loop.

    Args:
        run: the server; it calls its argument when it serves.
        log_file: where its output goes.

    Returns:
        What the server announced.

    Raises:
        DsecError: what kept it from serving.
    """
    log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours, theirs = os.pipe()
    if os.fork():
        os.close(theirs)
        return _wait(ours, log_file)
    os.close(ours)
    _leave_terminal(log_file)
    os._exit(_child(run, theirs))


def _wait(pipe: int, log_file: Path) -> str:
    with os.fdopen(pipe, "rb") as file:
        answer = file.read()
    if answer.startswith(READY):
        return answer[1:].decode()
    code, _, message = answer.decode().partition("\n")
    if not message:
        raise Unavailable(f"the server ended before it served; see {log_file}")
    raise error_from(code, message)


def _leave_terminal(log_file: Path) -> None:
    os.setsid()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.chdir("/")


def _child(run: Callable[[Callable[[str], None]], None], pipe: int) -> int:
    answer = os.fdopen(pipe, "wb", buffering=0)

    def announce(text: str) -> None:
        answer.write(READY + text.encode())
        answer.close()

    try:
        run(announce)
    except BaseException as exc:  # noqa: BLE001 - the end of a process
        error = _as_error(exc)
        # If it served, nobody waits any more, and the pipe's number may be another file's.
        if answer.closed or not isinstance(exc, DsecError):
            with suppress(OSError):  # the log's disk may be what is full
                traceback.print_exc()
                sys.stderr.flush()
        if not answer.closed:
            answer.write(f"{error.code}\n{error.message}".encode())
            answer.close()
        return error.exit_status
    return 0


def _as_error(exc: BaseException) -> DsecError:
    match exc:
        case DsecError():
            return exc
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return StorageFull(f"the disk is full: {exc.filename or exc.strerror}")
        case _:
            return InternalError(f"{type(exc).__name__}: {exc}")
