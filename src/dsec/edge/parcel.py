"""A trajectory as it is sent to the store: whose it is, then the file, compressed as one.

    zstd of   {"sandbox": ..., "project": ...}, a line feed, the file

Being within the blob, and the blob being known by its digest, whose it is cannot be changed without
the file: a document that names another project's blob does not open it. All of it blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard
from msgspec import Struct

from dsec.base.errors import DataUnavailable
from dsec.images.store.interface import BlobRef

PIECE_BYTES = 8 << 20
MAX_LABEL_BYTES = 4096
MAX_WINDOW_BYTES = 8 << 20
"""Of memory that unpacking one may take; what is packed here asks for less."""


class Label(Struct, frozen=True, kw_only=True):
    """Whose trajectory it is."""

    sandbox: str
    project: str


def pack(path: Path, packed: Path, label: Label) -> tuple[BlobRef, int]:
    """Put a trajectory into a parcel: the blob it makes, and the size of what it is made of.

    Raises:
        FileNotFoundError: there is no such trajectory. OSError: it cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    writer = zstandard.ZstdCompressor().stream_writer
    with path.open("rb") as source, packed.open("wb") as target, writer(target) as whole:
        whole.write(msgspec.json.encode(label) + b"\n")
        while piece := source.read(PIECE_BYTES):
            whole.write(piece)
            size += len(piece)
    with packed.open("rb") as written:
        while piece := written.read(PIECE_BYTES):
            digest.update(piece)
    return BlobRef(f"sha256:{digest.hexdigest()}", packed.stat().st_size), size


def unpack(packed: Path, path: Path, label: Label, size_bytes: int) -> None:
    """Take a trajectory out of a parcel.

    Args:
        packed: the parcel, its digest checked.
        path: where the trajectory goes.
        label: whose it must be.
        size_bytes: how large it is; nothing beyond is written.

    Raises:
        DataUnavailable: it is another's, of another size, or no parcel. OSError: no room.
    """
    try:
        with path.open("wb") as target:
            left = size_bytes
            for piece in _content(packed, label):
                left -= len(piece)
                if left < 0:
                    break
                target.write(piece)
    except zstandard.ZstdError as exc:
        raise DataUnavailable(f"the record of {label.sandbox} cannot be unpacked: {exc}") from exc
    if left:
        raise DataUnavailable(f"the record of {label.sandbox} is not of {size_bytes} bytes")


def _content(packed: Path, label: Label) -> Iterator[bytes]:
    pieces = _pieces(packed)
    line, newline, rest = next(pieces, b"").partition(b"\n")
    if not newline or len(line) > MAX_LABEL_BYTES or _read(line) != label:
        raise DataUnavailable(f"what the store has under {label.sandbox} is not its record")
    yield rest
    yield from pieces


def _pieces(packed: Path) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader
    with packed.open("rb") as source, reader(source) as whole:
        while piece := whole.read(PIECE_BYTES):
            yield piece


def _read(line: bytes) -> Label | None:
    try:
        return msgspec.json.decode(line, type=Label)
    except msgspec.MsgspecError:
        return None
