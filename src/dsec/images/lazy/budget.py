"""How much of the disk the cache takes, and what goes when it is too much.

First devices nobody has open, oldest first, whole. Then groups of open devices by the clock
algorithm, which is about least recently used: the hand goes round, a group used since it last
passed is spared once. Of an open device the chunks are unmarked first, so new readers fetch again;
those at work hold a pin and keep the group out of it.

With fanotify the kernel reads the cache file itself once a front has said yes, and no pin lasts as
long as that: there nothing of an open device is evicted (`evictable` is false).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import anyio

from dsec.images.lazy.cache import CachedData
from dsec.images.lazy.groups import ROUNDS, Groups
from dsec.kit.blocking import in_thread
from dsec.linux.files import boot_id

logger = logging.getLogger("dsec.filler")

SLACK_BYTES = 16 << 20
"""Evicted beyond what is needed, so that not every fetch has to; never over a 64th of the budget."""


class Device(Protocol):
    """An open device as the budget sees it."""

    @property
    def files(self) -> CachedData:
        """Its files in the cache."""
        ...

    @property
    def groups(self) -> Groups:
        """Its groups of chunks."""
        ...


class Shelf(Protocol):
    """The devices nobody has open."""

    @property
    def closed_bytes(self) -> int:
        """What they take of the disk."""
        ...

    async def drop_oldest(self) -> int:
        """Remove the one that was closed first; bytes freed, 0 if there is none."""
        ...


@dataclass(slots=True)
class _Hand:
    device: str = ""
    group: int = 0


class Budget:
    """Of one cache directory."""

    def __init__(self, limit_bytes: int, shelf: Shelf, *, evictable: bool = True) -> None:
        """Count from nothing.

        Args:
            limit_bytes: 0 = none; then only a full disk evicts.
            shelf: the closed devices.
            evictable: whether open devices may lose chunks.
        """
        self.limit_bytes = limit_bytes
        self.evicted_bytes = 0
        self._open_bytes = 0
        self._reserved_bytes = 0
        self._shelf = shelf
        self._evictable = evictable
        self._devices: dict[str, Device] = {}
        self._hand = _Hand()
        self._lock = anyio.Lock()

    @property
    def used_bytes(self) -> int:
        """What the cache takes of the disk."""
        return self._open_bytes + self._shelf.closed_bytes

    def opened(self, name: str, device: Device) -> None:
        """A device is open now; call `recount` after it."""
        self._devices[name] = device
        self.recount()

    def closed(self, name: str) -> None:
        """A device is about to be closed."""
        del self._devices[name]
        self.recount()

    def recount(self) -> None:
        """Ask the file system, which knows of what was written twice or not at all."""
        self._open_bytes = sum(each.files.allocated_bytes for each in self._devices.values())

    def took(self, reserved_bytes: int, written_bytes: int) -> None:
        """What was reserved has been used, or not."""
        self._reserved_bytes -= reserved_bytes
        self._open_bytes += written_bytes

    async def make_room(self, need_bytes: int) -> bool:
        """Reserve room for some bytes, until `took`; False = they cannot be kept."""
        if self._surplus(need_bytes) > 0:
            async with self._lock:
                await self._shrink(need_bytes)
                if self._surplus(need_bytes) > 0:
                    return False
        self._reserved_bytes += need_bytes
        return True

    async def relieve(self, need_bytes: int) -> bool:
        """The disk has just refused to take some bytes; False = nothing could go."""
        async with self._lock:
            return await self._free(need_bytes) > 0

    async def _shrink(self, need_bytes: int) -> None:
        if self._surplus(need_bytes) > 0:
            self.recount()
        if (surplus := self._surplus(need_bytes)) > 0:
            await self._free(surplus + min(SLACK_BYTES, self.limit_bytes // 64))

    def _surplus(self, need_bytes: int) -> int:
        """By how much some more bytes would be too many."""
        if not self.limit_bytes:
            return 0
        return self.used_bytes + self._reserved_bytes + need_bytes - self.limit_bytes

    async def _free(self, wanted_bytes: int) -> int:
        freed = 0
        while freed < wanted_bytes:
            dropped = await self._shelf.drop_oldest()
            if not dropped:
                break
            freed += dropped
        if freed < wanted_bytes and self._evictable:
            freed += await self._evict(wanted_bytes - freed)
        self.evicted_bytes += freed
        if freed:
            logger.info("evicted", extra={"bytes": freed, "wanted_bytes": wanted_bytes})
        return freed

    async def _evict(self, wanted_bytes: int) -> int:
        freed = 0
        for device, group in self._passing():
            freed += await self._throw_out(device, group)
            if freed >= wanted_bytes:
                break
        self.recount()
        return freed

    def _passing(self) -> Iterator[tuple[Device, int]]:
        """Groups that may go: as many rounds of the hand as make all of them idle, at most."""
        names = list(self._devices)
        start = names.index(self._hand.device) if self._hand.device in names else 0
        at = self._hand.group if self._hand.device in names else 0
        for name in [*names[start:], *names * ROUNDS, *names[: start + 1]]:
            while (device := self._devices.get(name)) is not None:
                group = device.groups.pass_hand(at)
                if group is None:
                    break
                at = group + 1
                self._hand = _Hand(name, at)
                yield device, group
            at = 0

    async def _throw_out(self, device: Device, group: int) -> int:
        first, end = device.groups.span(group)
        files = device.files
        with device.groups.leaving([group]), device.groups.pin(first, end):
            # Before anything is awaited: nobody has pinned it yet, and nobody may find it here.
            files.map.unmark(first, end)
            if files.state.complete:
                await in_thread("disk", files.unseal, boot_id())
            return await in_thread("disk", files.punch, first, end)
