"""How a stream is compressed, told from its first bytes, and the stream without it."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Literal, cast

from dsec.base.errors import InvalidRequest, Unsupported
from dsec.linux.process import CommandFailed, Filter

Compression = Literal["none", "gzip", "bzip2", "xz", "zstd"]

SNIFF_BYTES = 8
_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)

_DAMAGE = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


def sniff(head: bytes) -> Compression:
    """The compression of a stream that begins with these bytes."""
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "none")


@contextlib.contextmanager
def decompressed(source: IO[bytes], kind: Compression) -> Iterator[IO[bytes]]:
    """Read a stream without its compression.

    zstd needs the program of that name, since Python's standard library has none.

    Raises:
        InvalidRequest: the stream is cut short or damaged.
        Unsupported: zstd is not installed.
    """
    try:
        with _plain(source, kind) as plain:
            yield plain
    except _DAMAGE as error:
        raise InvalidRequest(f"the {kind} data is cut short or damaged: {error}") from error


def _plain(source: IO[bytes], kind: Compression) -> contextlib.AbstractContextManager[IO[bytes]]:
    match kind:
        case "gzip":
            return cast("IO[bytes]", gzip.GzipFile(fileobj=source, mode="rb"))
        case "bzip2":
            return cast("IO[bytes]", bz2.BZ2File(source))
        case "xz":
            return cast("IO[bytes]", lzma.LZMAFile(source))
        case "zstd":
            return _zstd(source)
        case "none":
            return contextlib.nullcontext(source)


@contextlib.contextmanager
def _zstd(source: IO[bytes]) -> Iterator[IO[bytes]]:
    try:
        program = Filter(["zstd", "-dcq", "--long=31"], source)
    except FileNotFoundError:
        advice = "install Debian's package zstd"
        raise Unsupported("the archive is compressed with zstd", advice=advice) from None
    with program:
        yield program.output
        if not program.output.read(1):
            try:
                program.finish()
            except CommandFailed as failure:
                raise InvalidRequest(f"the zstd data is cut short or damaged: {failure}") from None
