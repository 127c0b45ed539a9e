"""The bytes of a layer on their way: the blob as it lies, and the tar in it, hashed as it passes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Self

from dsec.base.errors import InvalidRequest
from dsec.images.oci.compression import SNIFF_BYTES

_PROGRESS_BYTES = 8 << 20
_CHUNK = 1 << 20
_MAX_HEADER_BYTES = 16 << 20
"""Of one header with all its pax records; a Linux xattr has at most 64 KiB."""


class BlobReader:
    """A run of a file, telling how far it is."""

    def __init__(self, file: IO[bytes], size: int, on_progress: Callable[[int], None]) -> None:
        self._file = file
        self._left = size
        self._done = 0
        self._told = 0
        self._on_progress = on_progress

    def peek(self) -> bytes:
        """The first bytes, without moving on."""
        head = os.pread(self._file.fileno(), SNIFF_BYTES, self._file.tell())
        return head[: self._left]

    def read(self, size: int = -1) -> bytes:
        """Like any file's."""
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        self._left -= len(data)
        self._done += len(data)
        if self._done - self._told >= _PROGRESS_BYTES:
            self._told = self._done
            self._on_progress(self._done)
        return data


class TarStream:
    """Reads a tar forward, hashing it: headers for `tarfile`, contents as they come.

    A thread decompresses and hashes the next chunk meanwhile; leaving the context ends it.
    tarfile's own reader of streams would copy its whole buffer for every header.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._chunk = b""
        self._at = 0
        self._before = 0
        """Bytes of the stream before the chunk."""
        self._digest = hashlib.sha256()
        self._ahead = ThreadPoolExecutor(1)
        self._next = self._ahead.submit(self._fetch)

    @property
    def digest(self) -> str:
        """sha256 of what was read, which is all after `drain`."""
        return f"sha256:{self._digest.hexdigest()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.shutdown()

    def _fetch(self) -> bytes:
        """A whole chunk, even of a stream that comes in crumbs: each costs a change of threads."""
        parts: list[bytes] = []
        left = _CHUNK
        while left and (part := self._stream.read(left)):
            parts.append(part)
            left -= len(part)
        chunk = parts[0] if len(parts) == 1 else b"".join(parts)
        self._digest.update(chunk)
        return chunk

    def _load(self) -> bool:
        self._before += len(self._chunk)
        self._chunk, self._at = self._next.result(), 0
        if self._chunk:
            self._next = self._ahead.submit(self._fetch)
        return bool(self._chunk)

    def read_some(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        if self._at == len(self._chunk) and not self._load():
            return b""
        part = self._chunk[self._at : self._at + size]
        self._at += len(part)
        return part

    def read(self, size: int) -> bytes:
        """Part of a header: exactly `size` bytes, fewer only at the end.

        Raises:
            InvalidRequest: no header is that large.
        """
        if size > _MAX_HEADER_BYTES:
            raise InvalidRequest(f"the tar has a header of {size} bytes")
        data = self.read_some(size)
        while len(data) < size and (more := self.read_some(size - len(data))):
            data += more
        return data

    def tell(self) -> int:
        """Bytes read so far."""
        return self._before + self._at

    def seek(self, offset: int) -> int:
        """Skip forward to an offset; at the end of the stream it stops short.

        Raises:
            InvalidRequest: it lies behind, so a header lies about its size.
        """
        if offset < self.tell():
            raise InvalidRequest("the tar is damaged: entries overlap")
        while offset > self.tell() and self.read_some(offset - self.tell()):
            pass
        return self.tell()

    def drain(self) -> None:
        """Read on to the end: padding after the end mark is part of the digest."""
        while self.read_some(_CHUNK):
            pass
