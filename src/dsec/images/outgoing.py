"""Snapshots on their way to the store, however long that is away and whatever is restarted."""

from __future__ import annotations

import logging

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from dsec.base.errors import Conflict, DsecError
from dsec.images.locks import KeyedLock
from dsec.images.names import ImageName
from dsec.images.records import ImageRecord
from dsec.images.sharing import Sharing
from dsec.images.shelf import Shelf
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.images.outgoing")

_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_AT_ONCE = 4


class Outgoing:
    """What this node still has to send.

    The record of a snapshot says whether it was sent, or that its name was given in the store
    meanwhile; that is tried again in the next run only.
    """

    def __init__(
        self, images: Shelf[ImageRecord], sharing: Sharing, tasks: TaskGroup, naming: KeyedLock
    ) -> None:
        """Join the node's parts; whoever gives or takes a name holds its lock."""
        self._images = images
        self._sharing = sharing
        self._tasks = tasks
        self._naming = naming
        self._under_way: dict[ImageName, anyio.CancelScope] = {}
        self._lines = anyio.CapacityLimiter(_AT_ONCE)

    def go_on(self) -> None:
        """Send what an earlier run could not."""
        for record in self._images.records():
            if record.snapshot is not None:
                self.add(record)

    def add(self, record: ImageRecord) -> None:
        """Send a snapshot in the background, unless it is there."""
        name = ImageName(record.name)
        is_needed = record.snapshot is not None and not record.snapshot.shown.stored
        if is_needed and name not in self._under_way:
            self._under_way[name] = anyio.CancelScope()
            self._tasks.start_soon(self._send, name, self._under_way[name])

    def cancel(self, name: ImageName) -> None:
        """Do not send it after all."""
        if scope := self._under_way.pop(name, None):
            scope.cancel()

    async def _send(self, name: ImageName, scope: anyio.CancelScope) -> None:
        """Send it, as often as it takes."""
        pause_s = _FIRST_PAUSE_S
        try:
            with scope:
                while not await self._is_sent(name):
                    await anyio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        finally:
            if self._under_way.get(name) is scope:
                del self._under_way[name]

    async def _is_sent(self, name: ImageName) -> bool:
        """Try to send it; whether no other try is wanted."""
        try:
            async with self._lines, self._naming.holding(name):
                await self._send_now(name)
        except (DsecError, OSError) as error:
            logger.warning("a snapshot was not sent", extra={"snapshot": name, "why": str(error)})
            return False
        return True

    async def _send_now(self, name: ImageName) -> None:
        record = self._images.find(name)
        if record is None or record.snapshot is None:
            return  # removed meanwhile
        told = _told(record, stored=True)
        try:
            await self._sharing.publish_image(told, _unheard, absent=True)
        except Conflict as error:
            self._sharing.names.changed("image", name)
            await self._sharing.names.image(name)  # fails if that was not what it is about
            logger.warning("a snapshot's name was taken", extra={"why": error.message})
            told = _told(record, conflict=True)
        await in_thread("disk", self._images.put, told)


def _told(record: ImageRecord, *, stored: bool = False, conflict: bool = False) -> ImageRecord:
    """A snapshot's record, saying what became of it."""
    if record.snapshot is None:
        return record
    shown = replace(record.snapshot.shown, stored=stored, conflict=conflict)
    return replace(record, snapshot=replace(record.snapshot, shown=shown))


def _unheard(_step: str, _done: int, _total: int) -> None:
    """Nobody watches."""
