"""Adding to trajectories from the event loop, at the price of a system call and not of a thread.

A few hundred bytes into the page cache take some microseconds (p99.9 under 1 ms beside two writers
that sync all the time: docs/adr/0026); a trip to a thread takes a tenth of a millisecond and more.
So small writes are made on the spot. One that was slow shows that the disk is in trouble: for a
while after it all of them go to a thread, those that wait together in one trip.
"""

from __future__ import annotations

import errno
from pathlib import Path

import anyio

from dsec.base.clock import Clock
from dsec.kit.blocking import in_thread
from dsec.linux.waits import waits
from dsec.trajectory import writer

SMALL_BYTES = 32 << 10
SLOW_S = 0.002
"""A write on the spot that took longer shows a disk in trouble."""
TROUBLE_S = 5.0
"""How long it is taken to last."""


class _Item:
    __slots__ = ("data", "done", "failure", "offset", "path")

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        self.data = data
        self.offset = 0
        self.failure: OSError | None = None
        self.done = anyio.Event()
        """Set when it is written, or when it is this one's turn to write what waits."""

    def write(self) -> None:
        """Blocks."""
        try:
            self.offset = writer.append(self.path, self.data)
        except OSError as exc:
            self.failure = exc


class Appender:
    """Adds to the trajectories of a node. To one file only one write goes on at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spared_until = float("-inf")
        self._waiting: list[_Item] = []
        self._busy = False

    async def append(self, path: Path, data: bytes) -> int:
        """Add whole frames; where in the file they are. Once begun it is done, cancelled or not.

        Raises:
            OSError: nothing was added.
        """
        item = _Item(path, data)
        now = self._clock.monotonic()
        if self._busy or len(data) > SMALL_BYTES or now < self._spared_until:
            with anyio.CancelScope(shield=True):
                await self._in_turn(item)
        else:
            self._on_the_spot(item, now)
        if item.failure is not None:
            raise item.failure
        return item.offset

    def _on_the_spot(self, item: _Item, now: float) -> None:
        before = waits()
        item.write()
        after = self._clock.monotonic()
        if after - now > SLOW_S and waits() > before:  # else it only lost its processor
            self._spared_until = after + TROUBLE_S

    async def _in_turn(self, item: _Item) -> None:
        self._waiting.append(item)
        if self._busy:
            await item.done.wait()
            if item not in self._waiting:
                return
        self._busy = True
        batch, self._waiting = self._waiting, []
        try:
            await in_thread("disk", _write_all, batch)
        except RuntimeError as exc:  # no thread could be started
            for unwritten in batch:
                unwritten.failure = OSError(errno.EAGAIN, str(exc))
        finally:
            for written in batch:
                written.done.set()
            self._busy = bool(self._waiting)
            if self._waiting:
                self._waiting[0].done.set()


def _write_all(batch: list[_Item]) -> None:
    for item in batch:
        item.write()
