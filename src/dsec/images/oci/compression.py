"""How a stream is compressed, told from its first bytes, and the stream without it."""

from __future__ import annotations

import bz2
import contextlib
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

_DAMAGE = (EOFError, lzma.LZMAError, zlib.error)
_GZIP = 31
"""zlib's way of saying: with gzip's header and checksum."""
_CHUNK = 1 << 18


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
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; bz2's own have no number
        raise InvalidRequest(f"the {kind} data is cut short or damaged: {error}") from error


def _plain(source: IO[bytes], kind: Compression) -> contextlib.AbstractContextManager[IO[bytes]]:
    match kind:
        case "gzip":
            return contextlib.nullcontext(cast("IO[bytes]", _Inflated(source)))
        case "bzip2":
            return cast("IO[bytes]", bz2.BZ2File(source))
        case "xz":
            return cast("IO[bytes]", lzma.LZMAFile(source))
        case "zstd":
            return _zstd(source)
        case "none":
            return contextlib.nullcontext(source)


class _Inflated:
    """gzip's data without its compression.

    `gzip.GzipFile` takes its input in 8 KiB, and each of these times asks for the interpreter,
    which a thread that works ahead of others seldom gets.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._input = b""
        self._member = zlib.decompressobj(_GZIP)

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end.

        Raises:
            EOFError: the data is cut short.
            zlib.error: it is damaged.
        """
        while not self._member.eof or self._begin_member():
            if not self._input and not self._fill():
                raise EOFError("the end is missing")
            data = self._member.decompress(self._input, size)
            self._input = self._member.unconsumed_tail or self._member.unused_data
            if data:
                return data
        return b""

    def _begin_member(self) -> bool:
        """Go on with what follows a member's end, but for zeros; False if nothing does."""
        while not (rest := self._input.lstrip(b"\0")) and self._fill():
            pass
        self._input = rest
        if rest:
            self._member = zlib.decompressobj(_GZIP)
        return bool(rest)

    def _fill(self) -> bool:
        self._input = self._source.read(_CHUNK)
        return bool(self._input)


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
