"""A layer's blobs, put into the store as far as they are not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from dsec.base.errors import NotFound
from dsec.images.data import DataStore
from dsec.images.layers import LayerStore
from dsec.images.pack import compress_file, pack
from dsec.images.records import DataRecord, LayerRecord, Packed, StoredLayer
from dsec.images.store.interface import BlobRef, BlobStore
from dsec.images.store.several import several
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.images.sending")

Report = Callable[[str, int, int], None]
"""Told a step, and how many of how many bytes of it are done."""


class Sending:
    """From one node's layers and data to the store."""

    def __init__(
        self, store: BlobStore, layers: LayerStore, data: DataStore, *, direct: bool
    ) -> None:
        self._store = store
        self._layers = layers
        self._data = data
        self._direct = direct

    async def complete(
        self, digest: str, known: StoredLayer | None, place: Path, report: Report
    ) -> StoredLayer:
        """Have all blobs of a layer in the store.

        What others have published is kept if it is whole: they read its packs, and may have
        mounted its raw data. This node adds what it lacks.

        Args:
            digest: of the layer; it is here, or known and whole.
            known: what the store's document says now.
            place: an empty directory for files on their way.
            report: is told the progress.

        Returns:
            What the document is to say; `known` itself if there is nothing to add.

        Raises:
            NotFound: (kind layer, data) what the store lacks is not here.
            StorageFull: no room there, or here.
        """
        if known is not None and await self._is_whole(known):
            return replace(known, data=[await self._with_raw(d, report) for d in known.data])
        layer = await in_thread("disk", self._layers.get, digest)
        published = {data.digest: data for data in known.data} if known else {}
        data = [
            await self._with_raw(await self._device(d, published.get(d), place, report), report)
            for d in layer.devices
        ]
        meta = await self._meta(layer, known, place, report)
        return StoredLayer(layer=layer, meta=meta, data=data)

    async def _is_whole(self, known: StoredLayer) -> bool:
        packed = [data.packed for data in known.data if data.packed]
        return await self._are_there([known.meta, *(ref for p in packed for ref in _refs(p))])

    async def _are_there(self, refs: list[BlobRef]) -> bool:
        missing: list[BlobRef] = []

        async def look(ref: BlobRef) -> None:
            if not await self._store.has_blob(ref.digest):
                missing.append(ref)

        await several(partial(look, ref) for ref in refs)
        return not missing

    async def _device(
        self, digest: str, known: DataRecord | None, place: Path, report: Report
    ) -> DataRecord:
        """Where data lies packed in the store; packed and sent if it lies nowhere."""
        own = await in_thread("disk", self._data.get, digest)
        for record in (known, own):
            if record and record.packed and await self._are_there(_refs(record.packed)):
                return record
        return await self._pack(own, place, report)

    async def _pack(self, record: DataRecord, place: Path, report: Report) -> DataRecord:
        raw = await in_thread("disk", self._data.raw, record.digest)
        if raw is None:
            raise NotFound(f"data {record.digest} is neither here nor in the store", kind="data")
        report("packing", 0, record.size_bytes)
        packed = await pack(
            raw, place, on_progress=lambda done: report("packing", done, record.size_bytes)
        )
        await self._send(place / "pack", packed.pack, report)
        await self._send(place / "table", packed.table, report)
        record = replace(record, packed=packed)
        await in_thread("disk", self._data.put_table, record, place / "table")
        return record

    async def _with_raw(self, record: DataRecord, report: Report) -> DataRecord:
        """With the raw data in the store too, if somebody mounts it and it can be had."""
        packed = record.packed
        if packed is None or not (self._direct or packed.raw):
            return record
        if not await self._store.has_blob(record.digest):
            raw = await in_thread("disk", self._data.raw, record.digest)
            if raw is None:
                return record
            await self._send(raw, BlobRef(record.digest, record.size_bytes), report)
        return replace(record, packed=replace(packed, raw=True))

    async def _meta(
        self, layer: LayerRecord, known: StoredLayer | None, place: Path, report: Report
    ) -> BlobRef:
        if known and known.layer.meta == layer.meta and await self._are_there([known.meta]):
            return known.meta
        packed = place / "meta"
        ref = await in_thread("build", compress_file, self._layers.meta(layer.digest), packed)
        await self._send(packed, ref, report)
        return ref

    async def _send(self, file: Path, ref: BlobRef, report: Report) -> None:
        if not await self._store.has_blob(ref.digest):
            await self._store.put_blob(
                file, ref.digest, lambda done: report("publishing", done, ref.size_bytes)
            )


def _refs(packed: Packed) -> list[BlobRef]:
    return [packed.pack, packed.table]
