"""The seam between what fetches data (the core) and what the kernel reads it through (a front)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol


class Reader(Protocol):
    """A data device as a front sees it: bytes that are here, or can be fetched."""

    @property
    def size_bytes(self) -> int:
        """Length of the device."""
        ...

    @property
    def cache_fd(self) -> int:
        """The sparse file that holds what is here at its own offset; open while the reader is."""
        ...

    def read_now(self, offset: int, length: int) -> bytes | None:
        """The bytes if all are here and no disk has to be waited for, else None.

        Cut at the device's end. Called on the event loop for every read: no awaiting, no thread.
        """
        ...

    def is_here(self, offset: int, length: int) -> bool:
        """Whether `ensure` would return at once; counts as a use if so. Called as `read_now` is."""
        ...

    async def read(self, offset: int, length: int) -> bytes:
        """The bytes, fetched if need be; cut at the device's end.

        Raises:
            DataUnavailable: the store does not give them, or gives others than it should.
        """
        ...

    async def ensure(self, offset: int, length: int) -> None:
        """Have the bytes in the cache file, and keep them there until somebody evicts them.

        Raises:
            DataUnavailable: as `read`. StorageFull: no room in the cache.
        """
        ...


class Front(Protocol):
    """One way of showing devices to the kernel as files."""

    @property
    def name(self) -> str:
        """Fuse or fanotify."""
        ...

    async def expose(self, name: str, reader: Reader) -> Path:
        """Show a device under a name; the path can be given to `mount_erofs` as a device.

        The same name with the same device again is harmless, also after the worker was restarted
        while the kernel held the file open.
        """
        ...

    async def withdraw(self, name: str) -> None:
        """Show it no more. Reads by those who have it open fail with EIO."""
        ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Answer the kernel while the context lasts."""
        ...
