"""Has the kernel ask before it reads a cache file itself: the fast front, only where asked for.

No data is copied, but it fails open: when nobody holds the group any more, what was not fetched
reads as zeros. So the keeper holds it, whoever mounts must be sure that the keeper lives, and a
mount that outlived its keeper is not to be trusted.

This process writes the cache files too. Those it opened before they were marked raise no events;
for one opened after (by a successor) the kernel asks us about our own writes: they come from
worker threads, and are let through. So this process must read nothing of what is mounted over
them: it would be let through as well, to zeros.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from dsec.base.errors import DsecError, Unsupported
from dsec.images.lazy.interface import Reader
from dsec.images.lazy.quiet import QuietLog
from dsec.kit.blocking import in_thread
from dsec.linux import fanotify
from dsec.linux.fanotify import Event

logger = logging.getLogger("dsec.filler")

_Inode = tuple[int, int]
_WHOLE_PAGES = 4096


def _inode_of(descriptor: int) -> _Inode:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class FanotifyFront:
    """Answers one group; see `Front`."""

    name = "fanotify"

    def __init__(self, descriptor: int, generation: int) -> None:
        """Take over a group.

        Args:
            descriptor: of the group, not blocking; stays the caller's.
            generation: how many processes answered it before.
        """
        self.group = descriptor
        self._generation = generation
        self._inodes: dict[str, _Inode] = {}
        self._readers: dict[_Inode, dict[str, Reader]] = {}
        self._own_pid = os.getpid()
        self._log = QuietLog(logger)

    async def expose(self, name: str, reader: Reader) -> Path:
        """Have the kernel ask for this device; the path is its cache file.

        Raises:
            Unsupported: the cache's file system has no such events.
        """
        try:
            fanotify.mark_file(self.group, reader.cache_fd)
        except OSError as error:
            raise Unsupported(
                f"fanotify cannot watch the cache: {error.strerror}",
                advice="use the front fuse, or a cache on ext4, XFS or Btrfs with Linux 6.14",
            ) from error
        await self.withdraw(name)
        inode = self._inodes[name] = _inode_of(reader.cache_fd)
        self._readers.setdefault(inode, {})[name] = reader
        return Path(os.readlink(f"/proc/self/fd/{reader.cache_fd}"))  # noqa: PTH115 - no disk is touched

    async def withdraw(self, name: str) -> None:
        """Deny it from now on. The mark stays as long as anybody has the file open."""
        inode = self._inodes.pop(name, None)
        if inode is None:
            return
        del self._readers[inode][name]
        if not self._readers[inode]:
            del self._readers[inode]

    def _reader_of(self, event: Event) -> Reader | None:
        """Who serves the file; if it was exposed under several names, the latest of them."""
        readers = self._readers.get(_inode_of(event.descriptor))
        return next(reversed(readers.values())) if readers else None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer the kernel; expose what was exposed before first.

        What a dead process took and did not answer is denied, which the kernel tries again in
        most cases; the others see EIO.
        """
        if self._generation > 0:
            denied = await in_thread("disk", fanotify.deny_unanswered, self.group)
            logger.info("denied what the last worker left", extra={"events": denied})
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            loop.add_reader(self.group, self._take, tasks)
            try:
                yield
            finally:
                loop.remove_reader(self.group)
                tasks.cancel_scope.cancel()

    def _take(self, tasks: TaskGroup) -> None:
        try:
            events = fanotify.read_events(self.group)
        except OSError as error:  # no descriptor left for an event: the kernel has denied it
            self._log.warning("events could not be taken: %s", error)
            return
        for event in events:
            self._dispatch(event, tasks)

    def _dispatch(self, event: Event, tasks: TaskGroup) -> None:
        reader = self._reader_of(event)
        if event.pid == self._own_pid:
            self._answer(event, allowed=True)
        elif reader is None:
            self._answer(event, allowed=False)
        elif self._is_here(event, reader):
            self._answer(event, allowed=True)
        else:
            tasks.start_soon(self._fetch, event, reader)

    def _is_here(self, event: Event, reader: Reader) -> bool:
        try:
            return reader.is_here(*_wanted(event, reader))
        except Exception:  # noqa: BLE001 - a reader waits, and the loop goes on
            self._log.exception("a read failed")
            return False  # `_fetch` meets it again

    async def _fetch(self, event: Event, reader: Reader) -> None:
        allowed = False
        try:
            await reader.ensure(*_wanted(event, reader))
            allowed = True
        except (DsecError, OSError) as error:
            self._log.warning("a read failed: %s", error)
        except Exception:  # noqa: BLE001 - a reader waits
            self._log.exception("a read failed")
        finally:
            # Also when this process ends in order: its successor denies by number at most.
            self._answer(event, allowed=allowed)

    def _answer(self, event: Event, *, allowed: bool) -> None:
        answer = fanotify.allow if allowed else fanotify.deny
        answer(self.group, event.descriptor)
        os.close(event.descriptor)


def _wanted(event: Event, reader: Reader) -> tuple[int, int]:
    """Offset and length to have, in whole pages: the kernel fills its cache by them."""
    if event.length == 0:
        return 0, reader.size_bytes
    start = event.offset - event.offset % _WHOLE_PAGES
    end = min(reader.size_bytes, -(-(event.offset + event.length) // _WHOLE_PAGES) * _WHOLE_PAGES)
    return start, max(0, end - start)
