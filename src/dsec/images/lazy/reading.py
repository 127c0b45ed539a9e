"""What a front reads from: hits at once, misses through the fetching."""

from __future__ import annotations

import errno
import os

import anyio
from typing_extensions import override

from dsec.base.errors import DataUnavailable
from dsec.images.lazy.fetching import Fetching
from dsec.kit.blocking import in_thread

_LARGEST = 1 << 20
_buffer = bytearray(_LARGEST)
"""Of all readers: `read_now` runs on the event loop, one at a time, and leaves nothing in it."""
_view = memoryview(_buffer)
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.EINVAL})


class FileReader:
    """A `Reader` (interface.py) of a device that is whole in a file."""

    def __init__(self, fd: int, size_bytes: int, chunk_bytes: int) -> None:
        """Read from an open file.

        Args:
            fd: stays the caller's, who closes it after the reader's last use.
            size_bytes: of the device.
            chunk_bytes: of each chunk.
        """
        self._size = size_bytes
        self._chunk = chunk_bytes
        self._fd = fd
        self._cannot_wait_not = False

    @property
    def size_bytes(self) -> int:
        """Length of the device."""
        return self._size

    @property
    def cache_fd(self) -> int:
        """The file."""
        return self._fd

    @property
    def chunk_bytes(self) -> int:
        """Of each chunk."""
        return self._chunk

    def read_now(self, offset: int, length: int) -> bytes | None:
        """See `Reader`."""
        length = min(length, self._size - offset)
        if length <= 0:
            return b""
        return self._pread_now(offset, length) if self.is_here(offset, length) else None

    def is_here(self, offset: int, length: int) -> bool:
        """See `Reader`."""
        del offset, length
        return True

    async def read(self, offset: int, length: int) -> bytes:
        """See `Reader`."""
        length = min(length, self._size - offset)
        if length <= 0:
            return b""
        data = self._pread_now(offset, length)
        if data is None:
            data = await in_thread("cached", self._pread, offset, length)
        return data

    async def ensure(self, offset: int, length: int) -> None:
        """See `Reader`."""

    def chunks_of(self, offset: int, length: int) -> tuple[int, int]:
        """First chunk and end (exclusive) of some bytes, cut at the device's end."""
        last = min(offset + length, self._size) - 1
        return offset // self._chunk, last // self._chunk + 1

    def _pread_now(self, offset: int, length: int) -> bytes | None:
        """What the page cache has; `read` asks it too, since a fetch has just filled it."""
        if length > _LARGEST or self._cannot_wait_not:
            return None
        try:
            count = os.preadv(self._fd, [_view[:length]], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return None  # not in the page cache
        except OSError as exc:
            if exc.errno not in _CANNOT:
                return None  # `read` meets it again and says so
            self._cannot_wait_not = True
            return None
        return _view[:length].tobytes() if count == length else None

    def _pread(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length:
            part = os.pread(self._fd, length, offset)
            if not part:
                raise OSError(errno.EIO, "the cache file is shorter than its device")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)


class DataReader(FileReader):
    """A `Reader` (interface.py) of a device whose data is fetched into a file."""

    def __init__(self, fetching: Fetching, read_timeout_s: float) -> None:
        """Read through the cache.

        Args:
            fetching: of the device.
            read_timeout_s: how long a read may take altogether.
        """
        files = fetching.files
        super().__init__(files.fd, files.state.size_bytes, files.state.chunk_bytes)
        self._fetching = fetching
        self._timeout_s = read_timeout_s
        self._covers = files.map.covers
        self._used = fetching.groups.used

    @override
    def is_here(self, offset: int, length: int) -> bool:
        """See `Reader`."""
        if offset >= self._size or length <= 0:
            return True
        first, end = self.chunks_of(offset, length)
        if not self._covers(first, end):
            return False
        self._used(first, end)
        return True

    @override
    async def read(self, offset: int, length: int) -> bytes:
        """See `Reader`."""
        length = min(length, self._size - offset)
        if length <= 0:
            return b""
        first, end = self.chunks_of(offset, length)
        with self._fetching.groups.pin(first, end):
            loose = await self._have(first, end)
            if loose:
                return await in_thread("cached", self._compose, offset, length, loose)
            data = self._pread_now(offset, length)
            if data is None:
                data = await in_thread("cached", self._pread, offset, length)
            return data

    @override
    async def ensure(self, offset: int, length: int) -> None:
        """See `Reader`.

        Nothing is pinned when it returns, and the kernel reads the file later: who uses this must
        keep the budget from evicting of open devices (`Budget`, evictable false).
        """
        length = min(length, self._size - offset)
        if length <= 0:
            return
        first, end = self.chunks_of(offset, length)
        with self._fetching.groups.pin(first, end):
            if await self._have(first, end):
                raise self._fetching.no_room()

    async def _have(self, first: int, end: int) -> dict[int, bytes]:
        if self._covers(first, end):
            self._used(first, end)
            return {}
        try:
            with anyio.fail_after(self._timeout_s):
                return await self._fetching.have(first, end)
        except TimeoutError:
            digest = self._fetching.digest
            what = f"data of {digest} did not come within {self._timeout_s:g} s"
            raise DataUnavailable(what, digest=digest) from None

    def _compose(self, offset: int, length: int, loose: dict[int, bytes]) -> bytes:
        """Bytes of which some could not be kept in the cache file."""
        parts: list[bytes] = []
        end = offset + length
        while offset < end:
            chunk, inside = divmod(offset, self._chunk)
            take = min(self._chunk - inside, end - offset)
            held = loose.get(chunk)
            parts.append(held[inside : inside + take] if held else self._pread(offset, take))
            offset += take
        return b"".join(parts)
