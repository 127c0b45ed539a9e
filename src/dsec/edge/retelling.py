"""A trajectory told to a caller: read in threads, some entries at a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dsec.base.errors import NotFound
from dsec.edge.histories import TRAJECTORY
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.seats import Seats
from dsec.edge.shipping import Shipping
from dsec.kit.blocking import in_thread
from dsec.trajectory.reader import NONE, Going, read
from dsec.wire.edge_v1 import SentTrajectory
from dsec.wire.sandbox import Recorded

AT_ONCE = 100
READERS = 64
"""Of trajectories, on a node: each has a file open, and 8 MiB of places at most."""
READERS_OF_ONE_PROJECT = 32
"""One project's slow readers leave room for the others."""


class Part(NamedTuple):
    """Which entries are wanted."""

    since: int = 1
    until: int | None = None
    ops: Sequence[str] = ()


class Retelling:
    """The trajectories of a node, and the store's, told to so many at once."""

    def __init__(self, journal: Journal, shipping: Shipping | None) -> None:
        """Tell what is here, and what the store has if there is one."""
        self._journal = journal
        self._shipping = shipping
        self._seats = Seats("reading trajectories", READERS, READERS_OF_ONE_PROJECT)

    async def run(self) -> None:
        """Send those that are over to the store, if there is one, for ever."""
        if self._shipping is not None:
            await self._shipping.run()

    def wake(self) -> None:
        """One more is over."""
        if self._shipping is not None:
            self._shipping.wake()

    async def tell(
        self,
        sandbox: str,
        part: Part,
        going: Callable[[], Awaitable[Going]],
        project: str = "",
    ) -> AsyncGenerator[Recorded, None]:
        """The operations of a trajectory, living or over, from here or from the store.

        Args:
            sandbox: whose.
            part: which of it.
            going: says what of it may be going on.
            project: of who reads; one from the store must be of it. Empty: whoever asks is trusted.

        Raises:
            NotFound: nobody has it. Unavailable: the store does not answer.
            DataUnavailable: what the store has is damaged, or another project's.
            RateLimited: too many read.
        """
        with self._seats.seat(project):
            may_go_on = await going()
            for path in self._places(sandbox):
                entries = read(path, *part, may_go_on)
                try:
                    first = await in_thread("disk", _some, entries)
                except FileNotFoundError:
                    continue
                async for entry in _told(first, entries):
                    yield entry
                return
            async with self._fetched(sandbox, project) as path:
                async for entry in _told([], read(path, *part, NONE)):
                    yield entry

    def _places(self, sandbox: str) -> list[Path]:
        """Where it may be, in the order it moves."""
        journal = self._journal
        return [journal.directory(sandbox) / TRAJECTORY, journal.trajectories / sandbox]

    @contextlib.asynccontextmanager
    async def _fetched(self, sandbox: str, project: str) -> AsyncIterator[Path]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                if self._shipping is None:
                    raise _unknown(sandbox)
                path = await stack.enter_async_context(self._shipping.fetched(sandbox, project))
            except NotFound:
                raise _unknown(sandbox) from None
            yield path

    async def sent(self, sandbox: str) -> SentTrajectory:
        """What the store says of one that was sent there.

        Raises:
            NotFound: it has none, or there is no store. Unavailable, DataUnavailable.
        """
        if self._shipping is None:
            raise _unknown(sandbox)
        try:
            record = await self._shipping.look(sandbox)
        except NotFound:
            raise _unknown(sandbox) from None
        return SentTrajectory(sandbox=record.sandbox, project=record.project)


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
