"""One hop into a worker thread per range: verify, decompress, write, and only then mark."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from dsec.base.errors import DataUnavailable
from dsec.images.lazy.cache import CachedData
from dsec.images.lazy.planning import Chunks, Range, runs

logger = logging.getLogger("dsec.filler")


@dataclass(slots=True)
class Outcome:
    """What became of the chunks of a range; those in neither mapping are in the cache."""

    loose: dict[int, bytes] = field(default_factory=dict)
    """Right, but they could not be written."""
    bad: dict[int, DataUnavailable] = field(default_factory=dict)
    """Not what their digest says."""
    written_bytes: int = 0


def unpack(table: Chunks, part: Range, body: bytes) -> Outcome:
    """Verify and decompress; nothing is written. Blocks."""
    outcome = Outcome()
    view = memoryview(body)
    for chunk in part.chunks:
        offset, length = table.stored_span(chunk)
        begin = offset - part.offset
        try:
            outcome.loose[chunk] = table.unpack_chunk(chunk, view[begin : begin + length])
        except DataUnavailable as error:
            outcome.bad[chunk] = error
    return outcome


def fill(files: CachedData, table: Chunks, part: Range, body: bytes) -> Outcome:
    """Verify, decompress, write and mark. Blocks."""
    outcome = unpack(table, part, body)
    for first, end in runs(list(outcome.loose)):
        data = b"".join(outcome.loose[chunk] for chunk in range(first, end))
        try:
            files.write(first, data)
        except OSError as exc:  # ENOSPC, a bad disk: those who wait get it from memory
            logger.warning("cannot write to the cache", extra={"error": str(exc)})
            return outcome
        files.map.mark(first, end)
        outcome.written_bytes += len(data)
        for chunk in range(first, end):
            del outcome.loose[chunk]
    return outcome
