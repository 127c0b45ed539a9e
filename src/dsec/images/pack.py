"""The packed form of a layer's data: what lies in a store, and how it is read back.

The raw data is cut into chunks; each is compressed alone with zstd, all back to back in one blob.
A table (36 bytes a chunk) says how long each is and what its digest is, so that any chunk can be
fetched by a range, and verified before a decompressor sees it. A chunk of zeros has no bytes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, NamedTuple

import anyio
import zstandard

from dsec.base.errors import DataUnavailable, InvalidRequest
from dsec.images.disk import fsync_path, full_disk_named
from dsec.images.records import Packed
from dsec.images.store.interface import BlobRef, nothing
from dsec.kit.blocking import in_thread

CHUNK_BYTES = 64 << 10
LEVEL = 3
ENTRY_BYTES = 36
"""Of the table: u32 little-endian stored size, 32 bytes sha256 of what is stored."""
_EMPTY_DIGEST = hashlib.sha256(b"").digest()
_SIZE_BYTES = 4
_WINDOW_BYTES = 4 << 20
"""What a thread compresses before the next step."""
_STREAM_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 16 << 20
_META_LEVEL = 9
"""Metadata is small and fetched by every node."""


class Span(NamedTuple):
    """A range of the pack."""

    offset: int
    length: int


# -- packing -----------------------------------------------------------------------------------


async def pack(
    data: Path,
    out_dir: Path,
    chunk_bytes: int = CHUNK_BYTES,
    level: int = LEVEL,
    on_progress: Callable[[int], None] = nothing,
) -> Packed:
    """Write `out_dir/pack` and `out_dir/table` for a raw data file. The same input, the same output.

    Compression runs on all processors, in threads that hold no lock meanwhile; memory is bounded
    by a few windows of 4 MiB for each.

    Args:
        data: does not change meanwhile.
        out_dir: exists; what is left in it on failure is rubbish.
        chunk_bytes: of each chunk uncompressed, a multiple of 4096.
        level: of zstd.
        on_progress: told the raw bytes done.

    Raises:
        InvalidRequest: the file is empty, or the chunk size is none.
        StorageFull: no room in `out_dir`.
    """
    size_bytes = (await in_thread("disk", data.stat)).st_size
    if size_bytes == 0 or chunk_bytes % 4096 or not 4096 <= chunk_bytes <= _MAX_CHUNK_BYTES:
        raise InvalidRequest(f"cannot pack {size_bytes} bytes in chunks of {chunk_bytes}")
    windows = _windows(size_bytes, chunk_bytes)
    workers = os.cpu_count() or 1
    writer = await in_thread("disk", _Writer.create, out_dir)
    try:
        job = _Job(data, chunk_bytes, level)
        done: list[_Window] = []
        for start in range(0, len(windows), workers * 2):
            batch = windows[start : start + workers * 2]
            done = await _round(job, batch, writer, done)
            on_progress(batch[-1].offset)
        await in_thread("disk", writer.add, done)
        on_progress(size_bytes)
        return await in_thread("disk", writer.finish, chunk_bytes)
    finally:
        writer.close()


def _windows(size_bytes: int, chunk_bytes: int) -> list[Span]:
    window = max(_WINDOW_BYTES // chunk_bytes, 1) * chunk_bytes
    return [
        Span(offset, min(window, size_bytes - offset)) for offset in range(0, size_bytes, window)
    ]


async def _round(
    job: _Job, batch: Sequence[Span], writer: _Writer, before: list[_Window]
) -> list[_Window]:
    """Compress some windows while what was compressed before is written."""
    made: dict[Span, _Window] = {}

    async def compress(window: Span) -> None:
        made[window] = await in_thread("pack", job.compress, window)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_thread, "disk", writer.add, before)
        for window in batch:
            tasks.start_soon(compress, window)
    return [made[window] for window in batch]


@dataclass(frozen=True, slots=True)
class _Window:
    """Some chunks, stored, and their part of the table."""

    stored: list[bytes]
    table: bytes


@dataclass(frozen=True, slots=True)
class _Job:
    data: Path
    chunk_bytes: int
    level: int

    def compress(self, window: Span) -> _Window:
        compressor = zstandard.ZstdCompressor(level=self.level)
        zeros = bytes(self.chunk_bytes)
        stored: list[bytes] = []
        table = bytearray()
        raw = memoryview(_read(self.data, window))
        for at in range(0, window.length, self.chunk_bytes):
            chunk = raw[at : at + self.chunk_bytes]
            if chunk == zeros[: len(chunk)]:
                table += _entry(0, _EMPTY_DIGEST)
                continue
            packed = compressor.compress(chunk)
            stored.append(packed)
            table += _entry(len(packed), hashlib.sha256(packed).digest())
        return _Window(stored, bytes(table))


def _entry(size: int, digest: bytes) -> bytes:
    return size.to_bytes(_SIZE_BYTES, "little") + digest


def _read(path: Path, span: Span) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, span.length, span.offset)
    finally:
        os.close(descriptor)
    if len(data) < span.length:
        raise InvalidRequest(f"{path} became shorter while it was packed")
    return data


@dataclass(slots=True)
class _Writer:
    """The two files, written in order, their digests on the way."""

    out_dir: Path
    pack: _Hashed
    table: _Hashed

    @classmethod
    def create(cls, out_dir: Path) -> _Writer:
        return cls(
            out_dir, _Hashed((out_dir / "pack").open("wb")), _Hashed((out_dir / "table").open("wb"))
        )

    def add(self, windows: Sequence[_Window]) -> None:
        with full_disk_named(self.out_dir):
            for window in windows:
                self.pack.write(b"".join(window.stored))
                self.table.write(window.table)

    def finish(self, chunk_bytes: int) -> Packed:
        with full_disk_named(self.out_dir):
            return Packed(
                pack=self.pack.finish(), table=self.table.finish(), chunk_bytes=chunk_bytes
            )

    def close(self) -> None:
        for each in (self.pack, self.table):
            each.file.close()


@dataclass(slots=True)
class _Hashed:
    """A file being written, and the digest of what was."""

    file: IO[bytes]
    size: int = 0
    hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)
        self.size += len(data)

    def finish(self) -> BlobRef:
        self.file.flush()
        os.fsync(self.file.fileno())
        return BlobRef(f"sha256:{self.hash.hexdigest()}", self.size)


# -- reading back ------------------------------------------------------------------------------


class ChunkTable:
    """Where each chunk lies in the pack, and how it is told from another."""

    def __init__(self, table: bytes, size_bytes: int, chunk_bytes: int, pack_bytes: int) -> None:
        """Check a table against what it is for. Some milliseconds for a large one: in a thread.

        Args:
            table: as stored; its digest was verified.
            size_bytes: of the raw data.
            chunk_bytes: of each chunk uncompressed.
            pack_bytes: of the pack.

        Raises:
            DataUnavailable: the table is for something else.
        """
        self.count = -(-size_bytes // chunk_bytes)
        if len(table) != self.count * ENTRY_BYTES:
            raise DataUnavailable(f"a table of {len(table)} bytes for {self.count} chunks")
        self._table = table
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self._ends = array("Q", accumulate(_sizes(table)))
        self._local = threading.local()
        if self._ends[-1] != pack_bytes:
            raise DataUnavailable(f"a table of {self._ends[-1]} bytes for a pack of {pack_bytes}")

    def raw_bytes(self, chunk: int) -> int:
        """Length of a chunk uncompressed; the last may be shorter."""
        return min(self._chunk_bytes, self._size_bytes - chunk * self._chunk_bytes)

    def stored_span(self, chunk: int) -> Span:
        """Where a chunk lies in the pack; length 0 = it is all zeros and not stored.

        Raises:
            IndexError: there is no such chunk.
        """
        if not 0 <= chunk < self.count:
            raise IndexError(chunk)
        start = self._ends[chunk - 1] if chunk else 0
        return Span(start, self._ends[chunk] - start)

    def spans(self, first: int, count: int) -> list[Span]:
        """Where each of some chunks that follow each other lies."""
        return [self.stored_span(chunk) for chunk in range(first, first + count)]

    def joint_span(self, first: int, count: int) -> Span:
        """The one range that holds some chunks that follow each other: they lie back to back."""
        start, end = self.stored_span(first), self.stored_span(first + count - 1)
        return Span(start.offset, end.offset + end.length - start.offset)

    def unpack_chunk(self, chunk: int, stored: bytes | memoryview) -> bytes:
        """Verify what a store sent for a chunk, then decompress it. May be called in any thread.

        Raises:
            DataUnavailable: it is not what it should be. Nothing of it has been decompressed.
        """
        at = chunk * ENTRY_BYTES + _SIZE_BYTES
        if hashlib.sha256(stored).digest() != self._table[at : at + hashlib.sha256().digest_size]:
            raise DataUnavailable(f"chunk {chunk} is not what was stored")
        length = self.raw_bytes(chunk)
        return self._decompress(chunk, stored, length) if len(stored) else bytes(length)

    def _decompress(self, chunk: int, stored: bytes | memoryview, length: int) -> bytes:
        # The frame says its size, and the library allocates that much: so it is looked at first.
        try:
            if zstandard.frame_content_size(stored) == length:
                return self._decompressor().decompress(stored, length, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DataUnavailable(f"chunk {chunk} cannot be decompressed: {error}") from error
        raise DataUnavailable(f"chunk {chunk} is not {length} bytes long")

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        """One for each thread: they are not to be shared."""
        made: zstandard.ZstdDecompressor | None = getattr(self._local, "made", None)
        if made is None:
            made = self._local.made = zstandard.ZstdDecompressor()
        return made


def _sizes(table: bytes) -> array[int]:
    words = array("I")
    words.frombytes(table)
    if sys.byteorder == "big":
        words.byteswap()
    return words[:: ENTRY_BYTES // words.itemsize]


# -- whole files -------------------------------------------------------------------------------


def compress_file(source: Path, target: Path) -> BlobRef:
    """Compress a metadata image. Blocks; the same input gives the same output.

    Returns:
        What the compressed file is known by.

    Raises:
        StorageFull: no room for it.
    """
    with full_disk_named(target), source.open("rb") as file, target.open("wb") as out:
        hashed = _Hashed(out)
        stream = zstandard.ZstdCompressor(level=_META_LEVEL).compressobj(source.stat().st_size)
        while part := file.read(_STREAM_BYTES):
            hashed.write(stream.compress(part))
        hashed.write(stream.flush())
        return hashed.finish()


def decompress_file(source: Path, target: Path, expected: BlobRef, limit: int) -> None:
    """Decompress a metadata image and check what comes out. Blocks; a bad target is removed.

    Args:
        source: the compressed file.
        target: is written, and synced.
        expected: what the uncompressed file is known by.
        limit: bytes it may have whatever is expected.

    Raises:
        DataUnavailable: it comes out as something else, or larger.
        StorageFull: no room for it.
    """
    if expected.size_bytes > limit:
        raise DataUnavailable(f"{expected.size_bytes} bytes are over the limit of {limit}")
    try:
        with full_disk_named(target), source.open("rb") as file, target.open("wb") as out:
            _check(_decompress_into(_Hashed(out), file, expected.size_bytes), expected)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    fsync_path(target.parent)


def _decompress_into(out: _Hashed, file: IO[bytes], most: int) -> BlobRef:
    decompressor = zstandard.ZstdDecompressor()
    try:
        with decompressor.stream_reader(file, read_size=_STREAM_BYTES) as reader:
            while out.size <= most and (part := reader.read(_STREAM_BYTES)):
                out.write(part)
    except zstandard.ZstdError as error:
        raise DataUnavailable(f"a compressed image is damaged: {error}") from error
    return out.finish()


def _check(found: BlobRef, expected: BlobRef) -> None:
    if found != expected:
        raise DataUnavailable(f"an image came out as {found.digest}, not {expected.digest}")
