"""The content of regular files into one raw data file, each file once, from whole block to block."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

from dsec.base.errors import InvalidRequest
from dsec.images import disk
from dsec.images.erofs.tree import BLOCK, HOLE, Device, Extent, join_extents

_GRANULE = 64 << 10
"""Zeros are left out in aligned pieces of this, in huge files of more."""
_MAX_GRANULES = 1 << 18
"""Of one file: each costs 8 bytes of metadata."""
_MAX_FILE_BYTES = 16 << 40
"""No device holds more, and a granule has to fit into memory."""
_BUFFER_BYTES = 1 << 20
_WHOLE = b""
"""The layout of a file without a hole."""

_Key = tuple[int, bytes, bytes]
"""Size, sha256 of what is not a hole, and which granules those are."""


@dataclass(frozen=True, slots=True)
class Zeros:
    """A run of zeros in a stream of pieces, not spelled out."""

    count: int


class DataWriter:
    """Appends files to a new data file: device 0 of the tree being made. Blocks.

    Leaving the context closes the file; without `finish` what is in it is not whole.
    """

    def __init__(self, path: Path) -> None:
        """Make the file.

        Raises:
            FileExistsError: there is one.
        """
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._hash = hashlib.sha256()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._waiting = 0
        """Bytes at the buffer's beginning that are neither in the file nor in `_hash`."""
        self._flushed = 0
        """Bytes that are in both."""
        self._known: dict[_Key, list[Extent]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, stream: Readable | Iterable[bytes | Zeros], size: int) -> list[Extent]:
        """Keep a regular file's content; where it lies.

        Content that was appended before is not kept again. An exception leaves the writer as it
        was before the call, whatever part of the stream was read.

        Args:
            stream: a file open for reading, or pieces of any size.
            size: what to take of the stream, in bytes.

        Raises:
            InvalidRequest: the stream ends early, or the file is larger than 16 TiB.
            StorageFull: no room for the data.
        """
        if size > _MAX_FILE_BYTES:
            raise InvalidRequest(f"a file of {size} bytes is larger than 16 TiB")
        source = _source_of(stream)
        with disk.full_disk_named(self._path):
            if size < _GRANULE:
                return self._append_small(_read(source, size)) if size else []
            return self._append_large(source, size)

    def _append_small(self, content: bytes) -> list[Extent]:
        key = (len(content), hashlib.sha256(content).digest(), _WHOLE)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = [self._keep(content)]
        return known.copy()

    def _append_large(self, source: Readable, size: int) -> list[Extent]:
        self._flush()
        flushed, hashed = self._flushed, self._hash.copy()
        try:
            key, extents = self._copy(source, size)
            if key not in self._known:
                self._known[key] = extents
                return extents.copy()
        except BaseException:
            self._rewind(flushed, hashed)
            raise
        self._rewind(flushed, hashed)
        return self._known[key].copy()

    def _copy(self, source: Readable, size: int) -> tuple[_Key, list[Extent]]:
        granule = _granule_of(size)
        zeros = bytes(granule)
        extents: list[Extent] = []
        layout = bytearray()
        hashed = hashlib.sha256()
        for start in range(0, size, granule):
            length = min(granule, size - start)
            content = _read_or_skip(source, length)
            hole = content is None or zeros.startswith(content)
            layout.append(hole)
            if content is None or hole:
                extents.append(Extent(HOLE, 0, -(-length // BLOCK)))
                continue
            hashed.update(content)
            extents.append(self._keep(content))
        key = (size, hashed.digest(), bytes(layout) if any(layout) else _WHOLE)
        return key, join_extents(extents)

    def _keep(self, content: bytes) -> Extent:
        blocks = -(-len(content) // BLOCK)
        end = self._waiting + blocks * BLOCK
        if end > _BUFFER_BYTES:
            self._flush()
            end = blocks * BLOCK
        extent = Extent(0, (self._flushed + self._waiting) // BLOCK, blocks)
        if end > _BUFFER_BYTES:
            self._write(content.ljust(end, b"\0"))
        else:
            self._buffer[self._waiting : end] = content.ljust(end - self._waiting, b"\0")
            self._waiting = end
        return extent

    def _flush(self) -> None:
        """Write what waits; if that fails, it still waits."""
        with memoryview(self._buffer) as buffer:
            self._write(buffer[: self._waiting])
        self._waiting = 0

    def _write(self, content: bytes | memoryview) -> None:
        with memoryview(content) as left:
            done = 0
            while done < len(left):
                done += os.pwrite(self._file, left[done:], self._flushed + done)
            self._hash.update(left)
        self._flushed += done

    def _rewind(self, flushed: int, hashed: hashlib._Hash) -> None:
        self._waiting = 0
        self._flushed, self._hash = flushed, hashed
        os.ftruncate(self._file, flushed)

    def finish(self) -> Device | None:
        """The device, its data written but not synced; None if there is no data.

        Raises:
            StorageFull: no room for the data.
        """
        with disk.full_disk_named(self._path):
            self._flush()
        if not self._flushed:
            return None
        return Device(f"sha256:{self._hash.hexdigest()}", self._flushed)


class Readable(Protocol):
    """What content can be read from."""

    def read(self, size: int, /) -> bytes:
        """At most that many bytes, none at the end."""
        ...


def _source_of(stream: Readable | Iterable[bytes | Zeros]) -> Readable:
    readable = stream if hasattr(stream, "read") else _Pieces(stream)
    return cast("Readable", readable)


def _granule_of(size: int) -> int:
    """What is looked at at once: larger for huge files, so that their metadata stays small."""
    least = -(-size // _MAX_GRANULES)
    return max(_GRANULE, 1 << (least - 1).bit_length())


def _read(source: Readable, size: int) -> bytes:
    """Exactly that many bytes."""
    content = source.read(size)
    if len(content) == size:
        return content
    parts = [content]
    missing = size - len(content)
    while missing:
        if not (content := source.read(missing)):
            raise InvalidRequest(f"a file's content ends {missing} bytes early")
        parts.append(content)
        missing -= len(content)
    return b"".join(parts)


def _read_or_skip(source: Readable, size: int) -> bytes | None:
    """Exactly that many bytes; None if the stream says that they are zeros."""
    if isinstance(source, _Pieces) and source.skip_zeros(size):
        return None
    return _read(source, size)


class _Pieces:
    """Pieces of any size, read like a file."""

    def __init__(self, pieces: Iterable[bytes | Zeros]) -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")
        self._zeros = 0

    def _fetch(self) -> None:
        """Have something at hand, unless the pieces are at their end."""
        while not self._piece and not self._zeros:
            piece = next(self._pieces, None)
            if piece is None:
                return
            if isinstance(piece, Zeros):
                self._zeros = piece.count
            else:
                self._piece = memoryview(piece)

    def skip_zeros(self, size: int) -> bool:
        """Pass over so many zeros, if that is what comes and the stream said so."""
        self._fetch()
        if self._zeros < size:
            return False
        self._zeros -= size
        return True

    def read(self, size: int, /) -> bytes:
        """At most that many bytes, none at the end."""
        self._fetch()
        if self._zeros:
            count = min(size, self._zeros)
            self._zeros -= count
            return bytes(count)
        piece, self._piece = self._piece[:size], self._piece[size:]
        return bytes(piece)
