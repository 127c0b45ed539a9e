"""A job's lease held while a command runs on this machine: how a trainer is wrapped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio
from anyio.abc import Process

from dsec.base.errors import Conflict, DsecError
from dsec.cli.output import note
from dsec.sdk import DSecClient
from dsec.wire.public_v1 import JobView, LeasePolicy

RENEW_AT = 1 / 3
"""Of its time: two renewals may fail before it lapses."""
RELEASE_WITHIN_S = 10.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a lease is asked for under."""

    job: str
    ttl_s: float
    on_lapse: LeasePolicy
    on_superseded: LeasePolicy

    async def take(self, dsec: DSecClient, epoch: int) -> JobView:
        """Take the next epoch (0), or renew one. Raises Conflict: it is superseded."""
        return await dsec.jobs.lease(
            self.job,
            epoch=epoch,
            ttl_s=self.ttl_s,
            on_lapse=self.on_lapse,
            on_superseded=self.on_superseded,
        )


async def hold(dsec: DSecClient, terms: Terms, epoch: int, command: Sequence[str]) -> int:
    """Run a command under a lease just taken; its exit status, 128 + n if signal n ended it.

    Raises:
        Conflict: the lease was superseded, and the command ended for it.
        OSError: the command cannot be started.
    """
    try:
        holder = _Holder(dsec, terms, epoch)
        return await holder.run(command)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(RELEASE_WITHIN_S):
            with suppress(DsecError):  # superseded, or it lapses by itself
                await dsec.jobs.release(terms.job, epoch)


class _Holder:
    def __init__(self, dsec: DSecClient, terms: Terms, epoch: int) -> None:
        self._dsec = dsec
        self._terms = terms
        self._epoch = epoch
        self._lost: Conflict | None = None

    async def run(self, command: Sequence[str]) -> int:
        """Until the command ends."""
        said = {"DSEC_JOB": self._terms.job, "DSEC_EPOCH": str(self._epoch)}
        async with anyio.create_task_group() as group:
            # Signals first: one that came before the command did would end us and not it.
            with anyio.open_signal_receiver(*_FORWARDED) as signals:
                async with await anyio.open_process(
                    command, stdin=None, stdout=None, stderr=None, env={**os.environ, **said}
                ) as process:
                    group.start_soon(self._forward, signals, process)
                    group.start_soon(self._renew, process)
                    status = await process.wait()
                group.cancel_scope.cancel()
        if self._lost is not None:
            raise self._lost
        return status if status >= 0 else 128 - status

    async def _forward(self, signals: AsyncIterator[signal.Signals], process: Process) -> None:
        async for number in signals:
            # A terminal has sent the command its own.
            if number != signal.SIGINT or not sys.stdin.isatty():
                _send(process, number)

    async def _renew(self, process: Process) -> None:
        while True:
            await anyio.sleep(self._terms.ttl_s * RENEW_AT)
            try:
                await self._terms.take(self._dsec, self._epoch)
            except Conflict as exc:
                self._lost = exc
                _send(process, signal.SIGTERM)
                return
            except DsecError as exc:
                note(
                    f"the lease of {self._terms.job} could not be renewed, trying on: {exc.message}"
                )


def _send(process: Process, number: int) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.Signals(number))
