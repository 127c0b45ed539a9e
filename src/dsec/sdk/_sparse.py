"""Files with holes in a tar: PAX sparse format 1.0, as GNU tar writes and reads it.

The entry's content is a map (numbers in decimal, one a line: how many pieces, then offset and
length of each), filled up to a block, and after it the pieces back to back.
"""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsec.base.errors import InvalidRequest
from dsec.sdk._tar import BLOCK, CHUNK_BYTES

WORTH_BYTES = 1 << 20
"""Holes smaller than this in all are sent as zeros."""
MAX_PIECES = 4096

Piece = tuple[int, int]
"""Offset and length."""


def pieces_of(path: Path, status: os.stat_result) -> list[Piece] | None:
    """Where a file has data; None if it is to be sent as it is."""
    if status.st_size - status.st_blocks * 512 < WORTH_BYTES:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = list(_pieces(descriptor, status.st_size))
    finally:
        os.close(descriptor)
    return found if len(found) <= MAX_PIECES else None


def _pieces(descriptor: int, size: int) -> Iterator[Piece]:
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break  # a hole up to the end
            raise
        at = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        yield start, at - start
    if at < size:
        yield size, 0  # says how long the file is


def entry(info: tarfile.TarInfo, path: Path, pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Header and content of a file with holes.

    Args:
        info: its header, with its name and apparent size.
        path: the file.
        pieces: of it, in order.

    Raises:
        InvalidRequest: the file became shorter while it was read.
    """
    lines = "".join(f"{offset}\n{length}\n" for offset, length in pieces)
    table = f"{len(pieces)}\n{lines}".encode()
    table += bytes(-len(table) % BLOCK)
    info.pax_headers = {
        **info.pax_headers,
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": info.name,
        "GNU.sparse.realsize": str(info.size),
    }
    stored = sum(length for _, length in pieces)
    info.name, info.size = f"GNUSparseFile.0/{info.name.rpartition('/')[2]}", len(table) + stored
    yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    yield table
    with path.open("rb") as file:
        for offset, length in pieces:
            file.seek(offset)
            left = length
            while left:
                if not (data := file.read(min(left, CHUNK_BYTES))):
                    raise InvalidRequest(f"{path} became shorter while it was read")
                left -= len(data)
                yield data
    yield bytes(-stored % BLOCK)
