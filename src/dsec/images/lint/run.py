"""Runs the child that looks into environments (`child.py`) and hands on what it says."""

from __future__ import annotations

import signal

import msgspec

from dsec.base.errors import DeadlineExceeded, InternalError
from dsec.images.children import Refused, run_child
from dsec.images.lint.child import Job, Linted, LintJob, Said, TraceJob, Viewed
from dsec.linux.process import CommandFailed, Completed
from dsec.wire.public_v1 import LintReport, TraceView

TIMEOUT_S = 900.0
VIEW_TIMEOUT_S = 120.0
_LATE = (None, -signal.SIGXCPU, -signal.SIGKILL)


async def run_lint(job: LintJob, timeout_s: float = TIMEOUT_S) -> LintReport:
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
    said = await _ask(job, timeout_s)
    if not isinstance(said, Linted):
        raise InternalError("the linter answered something else")
    return said.report


async def run_view(job: TraceJob, timeout_s: float = VIEW_TIMEOUT_S) -> TraceView:
    """Tell a recording by files, in a child process; cancelling kills it.

    Raises:
        DataUnavailable: metadata cannot be read.
        DeadlineExceeded, PayloadTooLarge, InternalError: as `run_lint`.
    """
    said = await _ask(job, timeout_s)
    if not isinstance(said, Viewed):
        raise InternalError("a trace was asked for, and something else answered")
    return said.view


async def _ask(job: Job, timeout_s: float) -> Linted | Viewed:
    said = _said(await _run(msgspec.json.encode(job), timeout_s))
    if isinstance(said, Refused):
        raise said.error()
    return said


async def _run(job: bytes, timeout_s: float) -> Completed:
    try:
        return await run_child("dsec.images.lint.child", stdin=job, timeout_s=timeout_s)
    except CommandFailed as failure:
        if failure.status in _LATE:
            raise DeadlineExceeded("looking the environment over took too long") from failure
        raise InternalError(str(failure)) from failure


def _said(done: Completed) -> Said:
    try:
        return msgspec.json.decode(done.stdout, type=Said)
    except msgspec.MsgspecError as error:
        raise InternalError(f"the linter said something else: {error}") from error
