"""Files with holes, as a tar has them: pieces one after the other, and a map of where they go."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import cast

from dsec.base.errors import InvalidRequest
from dsec.images.erofs.data import Readable, Zeros

_CHUNK = 1 << 20

Piece = tuple[int, int]
"""Offset and length in bytes."""


def map_of(member: tarfile.TarInfo) -> list[Piece]:
    """Where the pieces of a sparse file go; of another none."""
    return cast("list[Piece] | None", member.sparse) or []


def spread(member: tarfile.TarInfo, content: Readable) -> Iterator[bytes | Zeros]:
    """A sparse file's content; holes are said, not spelled out.

    Args:
        member: its header, with its map and its size with holes.
        content: the pieces, one after the other.

    Raises:
        InvalidRequest: pieces overlap, are out of order or leave the file, or the
            content ends early.
    """
    done = 0
    for offset, length in map_of(member):
        if length < 0 or offset < done or offset + length > member.size:
            raise InvalidRequest("the archive has a sparse file whose map makes no sense")
        if offset > done:
            yield Zeros(offset - done)
        yield from _take(content, length)
        done = offset + length
    if done < member.size:
        yield Zeros(member.size - done)


def _take(content: Readable, length: int) -> Iterator[bytes]:
    """So many bytes.

    Raises:
        InvalidRequest: there are fewer.
    """
    left = length
    while left:
        piece = content.read(min(left, _CHUNK))
        if not piece:
            raise InvalidRequest(f"a file's content ends {left} bytes early")
        left -= len(piece)
        yield piece
