"""Several things at once, failing as one; and one in the background, failing alone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import anyio

logger = logging.getLogger("dsec.kit")


async def together(works: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Do all of them at once; when one fails the others are cancelled.

    Raises:
        Exception: what the first to fail raised, itself and in no group.
    """
    try:
        async with anyio.create_task_group() as group:
            for work in works:
                group.start_soon(_done, work)
    except BaseExceptionGroup as several:
        raise _first(several) from several


async def _done(work: Callable[[], Awaitable[object]]) -> None:
    await work()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def survive(work: Callable[[], Awaitable[object]], what: str) -> None:
    """Do background work of a long-lived task group: what it raises is logged and ends it alone.

    Args:
        work: what to do.
        what: it is, for the log.
    """
    try:
        await work()
    except Exception:  # the group's other work goes on
        logger.exception("background work failed", extra={"what": what})
