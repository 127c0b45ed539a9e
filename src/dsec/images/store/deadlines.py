"""Attempts with a time limit each, and long work that may go on while it makes progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from dsec.base.errors import Unavailable
from dsec.images.store.options import StoreOptions

T = TypeVar("T")


async def within(limit_s: float, what: str, work: Callable[[], Awaitable[T]]) -> T:
    """Do something once.

    Raises:
        Unavailable: it took longer than `limit_s`.
    """
    try:
        with anyio.fail_after(limit_s):
            return await work()
    except TimeoutError as error:
        raise Unavailable(f"{what}: no answer within {limit_s:g} s") from error


async def persevere(
    options: StoreOptions, what: str, work: Callable[[], Awaitable[T]], timeout_s: float = 0.0
) -> T:
    """Do something that may be repeated, until it succeeds or the attempts are used up.

    Args:
        options: how often, with which limit and which pauses.
        what: for the message.
        work: raises Unavailable if it is worth another attempt.
        timeout_s: of one attempt, if not that of the options.

    Raises:
        Unavailable: the last attempt's.
    """
    pause_s = options.pause_s
    for _ in range(options.attempts - 1):
        try:
            return await within(timeout_s or options.timeout_s, what, work)
        except Unavailable:
            await anyio.sleep(pause_s)
            pause_s *= 2
    return await within(timeout_s or options.timeout_s, what, work)


@contextmanager
def while_it_moves(limit_s: float, what: str) -> Iterator[Callable[[], None]]:
    """Bound a body that has no known length: it calls what it gets whenever it got further.

    Raises:
        Unavailable: it has not for `limit_s`.
    """
    try:
        with anyio.fail_after(limit_s) as scope:

            def moved() -> None:
                scope.deadline = anyio.current_time() + limit_s

            yield moved
    except TimeoutError as error:
        raise Unavailable(f"{what}: no progress within {limit_s:g} s") from error
