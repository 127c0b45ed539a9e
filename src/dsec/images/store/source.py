"""A file on its way into a store: read in parts off the event loop, its digest checked in passing.

A wrong blob under a right digest would never be replaced, on any node: so the last part is handed
out only when the whole is known to be what its digest says.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.base.digests import hex_of
from dsec.base.errors import InvalidRequest
from dsec.images.store.interface import nothing
from dsec.kit.blocking import in_thread

MAX_PARTS = 9_000
"""S3 takes 10,000: parts of very large files are larger than was asked for."""


class Source:
    """An open file. An asynchronous iterator over its parts, which may be gone through once."""

    def __init__(
        self, descriptor: int, digest: str, part_bytes: int, on_progress: Callable[[int], None]
    ) -> None:
        self.size_bytes = os.fstat(descriptor).st_size
        self.part_bytes = max(part_bytes, -(-self.size_bytes // MAX_PARTS))
        self._descriptor = descriptor
        self._digest = digest
        self._on_progress = on_progress
        self._hash = hashlib.sha256()
        self._done = 0

    def __aiter__(self) -> Source:
        """The parts, all of `part_bytes` but the last."""
        return self

    async def __anext__(self) -> bytes:
        """The next part.

        Raises:
            InvalidRequest: this would be the last one, and the file has another digest.
        """
        self._on_progress(self._done)
        if self._done == self.size_bytes:
            raise StopAsyncIteration
        part = await in_thread("disk", self._next)
        self._done += len(part)
        return part

    async def whole(self) -> bytes:
        """All of a small file at once.

        Raises:
            InvalidRequest: it has another digest.
        """
        return await in_thread("disk", self._whole)

    def sent(self) -> None:
        """Tell the progress that all has been sent."""
        self._on_progress(self.size_bytes)

    async def part_at(self, offset: int) -> bytes:
        """A part from anywhere, unchecked: for a store that checks the whole itself."""
        length = min(self.part_bytes, self.size_bytes - offset)
        return await in_thread("disk", self._read, length, offset)

    def _next(self) -> bytes:
        length = min(self.part_bytes, self.size_bytes - self._done)
        part = self._read(length, self._done)
        self._hash.update(part)
        if self._done + length == self.size_bytes:
            self._check()
        return part

    def _whole(self) -> bytes:
        data = self._read(self.size_bytes, 0)
        self._hash.update(data)
        self._check()
        return data

    def _read(self, length: int, offset: int) -> bytes:
        data = os.pread(self._descriptor, length, offset)
        if len(data) < length:
            raise InvalidRequest(f"the file for {self._digest} became shorter while it was read")
        return data

    def _check(self) -> None:
        if self._hash.hexdigest() != hex_of(self._digest):
            raise InvalidRequest(f"the file is not what its digest says: {self._digest}")


@asynccontextmanager
async def opened(
    file: Path, digest: str, part_bytes: int, on_progress: Callable[[int], None] = nothing
) -> AsyncIterator[Source]:
    """A file to be stored, open while the context lasts.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = await in_thread("disk", os.open, file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield Source(descriptor, digest, part_bytes, on_progress)
    finally:
        os.close(descriptor)
