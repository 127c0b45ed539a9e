"""Runs the linter's child (`child.py`) and hands on what it says."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

import dsec
from dsec.base.errors import DeadlineExceeded, InternalError, error_from
from dsec.images.lint.child import Job, Linted, Refused, Said
from dsec.linux.process import CommandFailed, Completed, run_async
from dsec.wire.public_v1 import LintReport

TIMEOUT_S = 900.0
_ARGV = (sys.executable, "-X", "utf8", "-m", "dsec.images.lint.child")


async def run_lint(job: Job, timeout_s: float = TIMEOUT_S) -> LintReport:
    """Look an environment over in a child process; cancelling kills it.

    Args:
        job: what to look over, by files of this host. Devices may be those that the filler shows.
        timeout_s: how long it may take, waiting for data included.

    Raises:
        InvalidRequest: an own rule is bad.
        DataUnavailable: data cannot be read.
        DeadlineExceeded: it took too long, or too much processor time.
        PayloadTooLarge: it took too much memory.
        InternalError: a metadata image is damaged, or the child failed otherwise.
    """
    job = msgspec.structs.replace(job, parent=os.getpid())
    match _said(await _run(msgspec.json.encode(job), timeout_s)):
        case Linted(report):
            return report
        case Refused(code, message):
            raise error_from(code, message)


async def _run(job: bytes, timeout_s: float) -> Completed:
    try:
        return await run_async(_ARGV, stdin=job, timeout_s=timeout_s, env=_environment())
    except CommandFailed as failure:
        if failure.status in (None, -signal.SIGXCPU, -signal.SIGKILL):
            raise DeadlineExceeded("looking the environment over took too long") from failure
        raise InternalError(str(failure)) from failure


def _said(done: Completed) -> Said:
    try:
        return msgspec.json.decode(done.stdout, type=Said)
    except msgspec.MsgspecError as error:
        raise InternalError(f"the linter said something else: {error}") from error


def _environment() -> dict[str, str]:
    """Only what Python needs; the package is found wherever this process found it."""
    package = Path(dsec.__path__[0]).parent
    return {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(package)}
