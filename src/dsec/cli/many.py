"""The same asked of many sandboxes at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from dsec.base.errors import DsecError
from dsec.cli.boundary import report
from dsec.sdk import DSecClient, Sandbox

R = TypeVar("R")
AT_ONCE = 32


async def on_each(
    dsec: DSecClient, ids: Sequence[str], act: Callable[[Sandbox], Awaitable[R]]
) -> tuple[list[R], list[DsecError]]:
    """Do something to each; what came of it in order of completion, and what went wrong."""
    done: list[R] = []
    failed: list[DsecError] = []
    limit = anyio.CapacityLimiter(AT_ONCE)

    async def one(sandbox_id: str) -> None:
        async with limit:
            try:
                done.append(await act(await dsec.get(sandbox_id)))
            except DsecError as exc:
                failed.append(exc)

    async with anyio.create_task_group() as group:
        for sandbox_id in ids:
            group.start_soon(one, sandbox_id)
    return done, failed


def report_all(failed: Sequence[DsecError]) -> int:
    """Say what went wrong; the status of the first of it, 0 if nothing did."""
    statuses = [report(error) for error in failed]
    return statuses[0] if statuses else 0
