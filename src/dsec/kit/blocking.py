"""The only way to a worker thread: one named limit per purpose.

Kernel work that may block (mounts, cgroups, disk) goes through here, so that a slow disk holds up
the threads of its own purpose and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")
Args = TypeVarTuple("Args")

LIMITS = {
    "disk": 8,
    "mount": 4,
    "cgroup": 4,
    "thaw": 4,
    "reclaim": 2,
    "refill": 2,
    "build": 2,
    "scan": 4,
    "store": 16,
    "pack": 16,
    "fill": 2,
    "cached": 8,
    "look": 2,
    "diff": 2,
    "take": 8,
    "names": 2,
    "network": 3,
}
"""Threads that may work for a purpose at once; an unknown purpose is a programming error."""

_limiters: RunVar[dict[str, anyio.CapacityLimiter]] = RunVar("dsec_limiters")


def _limiter(purpose: str) -> anyio.CapacityLimiter:
    try:
        limiters = _limiters.get()
    except LookupError:
        limiters = {
            f"{name}{kind}": anyio.CapacityLimiter(count)
            for name, count in LIMITS.items()
            for kind in ("", " place")
        }
        _limiters.set(limiters)
    return limiters[purpose]


@contextlib.asynccontextmanager
async def place_for(purpose: str) -> AsyncIterator[None]:
    """Be one of as many at once as the purpose has threads: inside, one of them is to be had.

    That holds if all work for the purpose is done inside. What waits for a place holds nothing yet.
    """
    async with _limiter(f"{purpose} place"):
        yield


async def in_thread(
    purpose: str, func: Callable[[Unpack[Args]], T], *args: *Args, abandon: bool = False
) -> T:
    """Run a blocking function in a worker thread of its purpose.

    Args:
        purpose: a key of `LIMITS`.
        func: what to run; it must not touch the event loop.
        args: its arguments.
        abandon: on cancellation leave the thread to finish by itself instead of waiting for it.
    """
    return await anyio.to_thread.run_sync(
        func, *args, limiter=_limiter(purpose), abandon_on_cancel=abandon
    )
