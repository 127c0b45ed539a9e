"""What the store says of a layer, judged before anything is done with it. Pure.

What names files here, and what sizes buffers, is believed of nobody.
"""

from __future__ import annotations

from dsec.base.errors import DataUnavailable, InvalidRequest
from dsec.images.erofs.format import MAX_IMAGE_BYTES
from dsec.images.pack import ENTRY_BYTES
from dsec.images.records import DataRecord, Packed, StoredLayer, check_digest
from dsec.images.store.interface import BlobRef

MAX_META_BYTES = MAX_IMAGE_BYTES
MAX_TABLE_BYTES = 64 << 20
"""Of 116 GiB of data."""
_BLOCK = 4096
_MAX_CHUNK_BYTES = 16 << 20


def check_stored(stored: StoredLayer, digest: str) -> None:
    """Judge a document that was asked for by the layer's digest.

    Raises:
        DataUnavailable: it is about another layer, names what is no digest, or has sizes that
            cannot be.
    """
    try:
        _check(stored, digest)
    except InvalidRequest as error:
        raise DataUnavailable(
            f"the store's document of layer {digest} is odd: {error.message}"
        ) from error


def _check(stored: StoredLayer, digest: str) -> None:
    layer = stored.layer
    if layer.digest != digest or [data.digest for data in stored.data] != layer.devices:
        raise InvalidRequest("it is about another one")
    for text in [layer.digest, *layer.devices, *layer.below, *layer.merged]:
        check_digest(text)
    for meta in (layer.meta, stored.meta):
        _check_blob(meta, MAX_META_BYTES)
    for data in stored.data:
        _check_data(data)


def _check_data(data: DataRecord) -> None:
    if data.size_bytes <= 0 or data.size_bytes % _BLOCK:
        raise InvalidRequest(f"data of {data.size_bytes} bytes")
    if data.packed is None:
        raise InvalidRequest(f"it does not say where data {data.digest} lies")
    _check_packed(data.packed, data.size_bytes)


def _check_packed(packed: Packed, size_bytes: int) -> None:
    chunk = packed.chunk_bytes
    if chunk % _BLOCK or not _BLOCK <= chunk <= _MAX_CHUNK_BYTES:
        raise InvalidRequest(f"chunks of {chunk} bytes")
    _check_blob(packed.table, MAX_TABLE_BYTES)
    if packed.table.size_bytes != ENTRY_BYTES * -(-size_bytes // chunk):
        raise InvalidRequest(f"a table of {packed.table.size_bytes} bytes for {size_bytes}")
    _check_blob(packed.pack, 2 * size_bytes)  # what zstd cannot compress grows by little


def _check_blob(ref: BlobRef, limit: int) -> None:
    check_digest(ref.digest)
    if not 0 <= ref.size_bytes <= limit:
        raise InvalidRequest(f"a blob of {ref.size_bytes} bytes, over {limit}")


def refs_of(stored: StoredLayer) -> list[BlobRef]:
    """The blobs a stored layer needs."""
    refs = [stored.meta]
    for data in stored.data:
        if data.packed:
            refs += [data.packed.pack, data.packed.table]
            refs += [BlobRef(data.digest, data.size_bytes)] if data.packed.raw else []
    return refs
