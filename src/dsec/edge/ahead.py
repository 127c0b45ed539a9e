"""Reading ahead of whoever is held up, so that the source's end is noticed all the same.

What a client sends goes on only as fast as the sandbox takes it. Without a reader of its own, a
client that leaves while nothing is taken would never be missed, and its operation never end.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import anyio

from dsec.kit.generators import closing

T = TypeVar("T")

SWALLOW_S, SWALLOW_PAUSE_S = 2.0, 0.1
SWALLOW_BYTES = 64 << 20
MAX_ITEMS = 4
"""Kept between the source and its user. A source that has more to say is not read further."""


@contextlib.asynccontextmanager
async def reading_ahead(source: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Read a source in a task of its own. If it fails the block is cancelled, and the failure raised.

    Raises:
        Exception: what the source raised.
    """
    failure: Exception | None = None
    into, out = anyio.create_memory_object_stream[T](MAX_ITEMS)

    async def read() -> None:
        nonlocal failure
        try:
            async with closing(source) as items:
                async for item in items:
                    await into.send(item)
        except Exception as exc:  # noqa: BLE001 - raised again outside the group
            # Not closed then: the block must not take what broke off for all there was.
            failure = exc
            group.cancel_scope.cancel()
        else:
            into.close()

    with into, out:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            try:
                yield out
            except Exception as exc:  # noqa: BLE001 - raised again outside the group
                failure = failure or exc
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def swallow(source: AsyncIterator[bytes]) -> None:
    """Throw away what is on its way, for a moment.

    Whoever is still sending does not hear an early answer: a server that closes with unread bytes
    resets the connection, and the answer goes with it. A sender who pauses hears it.
    """
    size = 0
    with anyio.move_on_after(SWALLOW_S) as whole:
        while size < SWALLOW_BYTES:
            with anyio.move_on_after(SWALLOW_PAUSE_S) as pause:
                chunk = await anext(source, None)
            if pause.cancelled_caught or whole.cancel_called or chunk is None:
                return
            size += len(chunk)
