"""The entries of a tar: `tarfile` reads the headers, contents are handed on as they come."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO, cast

from typing_extensions import override

from dsec.base.errors import InvalidRequest
from dsec.images.oci.sparse import map_of
from dsec.images.oci.stream import TarStream

_STUMBLES = (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError)
"""What tarfile raises over headers that lie."""


class _StrictTarInfo(tarfile.TarInfo):
    """tarfile takes a damaged header in the middle for the end of the archive; this does not."""

    @classmethod
    @override
    def fromtarfile(cls, archive: tarfile.TarFile) -> _StrictTarInfo:
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise InvalidRequest(f"the tar is cut short or damaged: {error}") from error


class _EndedTarInfo(_StrictTarInfo):
    """Also refuses an archive without its end mark: nothing else tells that it is whole."""

    @classmethod
    @override
    def fromtarfile(cls, archive: tarfile.TarFile) -> _EndedTarInfo:
        try:
            return cast("_EndedTarInfo", super().fromtarfile(archive))
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            raise InvalidRequest("the tar is cut short: it has no end mark") from error


class Content:
    """What an archive has of one file, to be read before the next entry is asked for."""

    def __init__(self, stream: TarStream, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        data = self._stream.read_some(min(size, self._left)) if self._left > 0 else b""
        self._left -= len(data)
        return data


def members(
    stream: TarStream, *, need_end: bool
) -> Iterator[tuple[tarfile.TarInfo, Content | None]]:
    """The entries of a tar, each with the content of a regular file.

    Of a sparse file the content is its pieces, one after the other.

    Args:
        stream: the tar without compression.
        need_end: refuse a tar without its end mark.

    Raises:
        InvalidRequest: the tar is cut short or damaged.
    """
    archive = _open(stream, _EndedTarInfo if need_end else _StrictTarInfo)
    while (member := _next(archive)) is not None:
        archive.members.clear()  # type: ignore[attr-defined]
        yield member, _content(stream, member) if member.isreg() else None


def _open(stream: TarStream, kind: type[tarfile.TarInfo]) -> tarfile.TarFile:
    try:
        return tarfile.TarFile(
            fileobj=cast("IO[bytes]", stream),
            mode="r",
            tarinfo=kind,
            encoding="utf-8",
            errors="surrogateescape",
        )
    except _STUMBLES as error:
        raise InvalidRequest(f"the tar cannot be read: {error}") from error


def _next(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        return archive.next()
    except _STUMBLES as error:
        raise InvalidRequest(f"the tar cannot be read: {error}") from error


def _content(stream: TarStream, member: tarfile.TarInfo) -> Content:
    stream.seek(member.offset_data)
    size = sum(length for _, length in map_of(member)) if member.issparse() else member.size
    return Content(stream, size)
