"""Many requests to a store, some at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from dsec.kit.together import together

AT_ONCE = 16


async def several(works: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Do all of them, at most 16 at once; when one fails the others are cancelled.

    Raises:
        Exception: what the first to fail raised.
    """
    todo = iter(works)

    async def worker() -> None:
        for work in todo:
            await work()

    await together([worker] * AT_ONCE)
