"""A trajectory told to a caller: read in threads, some entries at a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dsec.base.errors import NotFound
from dsec.edge.shipping import Shipping
from dsec.kit.blocking import in_thread
from dsec.trajectory.reader import read
from dsec.wire.sandbox import Recorded

AT_ONCE = 100


class Part(NamedTuple):
    """Which entries are wanted."""

    since: int = 1
    until: int | None = None
    ops: Sequence[str] = ()


async def retell(
    sandbox: str, places: Sequence[Path], shipping: Shipping | None, part: Part
) -> AsyncGenerator[Recorded, None]:
    """The operations of a trajectory, from the first of the places that has it, or the store.

    Raises:
        NotFound: nobody has it. Unavailable: the store does not answer.
    """
    for path in places:
        entries = read(path, *part)
        try:
            first = await in_thread("disk", _some, entries)
        except FileNotFoundError:
            continue
        async for entry in _told(first, entries):
            yield entry
        return
    if shipping is None:
        raise _unknown(sandbox)
    async with contextlib.AsyncExitStack() as stack:
        try:
            path = await stack.enter_async_context(shipping.fetched(sandbox))
        except NotFound:
            raise _unknown(sandbox) from None
        async for entry in _told([], read(path, *part)):
            yield entry


def _unknown(sandbox: str) -> NotFound:
    return NotFound(f"nothing is known of sandbox {sandbox}", kind="sandbox", sandbox=sandbox)


async def _told(
    first: list[Recorded], entries: Iterator[Recorded]
) -> AsyncGenerator[Recorded, None]:
    some = first or await in_thread("disk", _some, entries)
    while some:
        for entry in some:
            yield entry
        some = await in_thread("disk", _some, entries)


def _some(entries: Iterator[Recorded]) -> list[Recorded]:
    return list(islice(entries, AT_ONCE))
