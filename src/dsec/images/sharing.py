"""Environments in the shared store: published whole, found by name, fetched as far as a mount needs.

What is published never changes; a name may come to mean something else. To publish again is
harmless and goes on where an interrupted try ended: blobs that are there are not sent again.
Documents come last, so what can be found can be read.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from dsec.base.errors import DataUnavailable, NotFound
from dsec.images import disk
from dsec.images.collecting import publishing, refs_of
from dsec.images.data import DataStore
from dsec.images.layers import LayerStore
from dsec.images.locks import KeyedLock
from dsec.images.pack import compress_file, decompress_file, pack
from dsec.images.records import (
    DataRecord,
    ImageRecord,
    LayerRecord,
    NamedLayer,
    StoredLayer,
    check_digest,
    decode,
    encode,
)
from dsec.images.store.interface import BlobRef, BlobStore, DocumentKind
from dsec.kit.blocking import in_thread
from dsec.kit.together import together
from dsec.wire.public_v1 import LayerKind

logger = logging.getLogger("dsec.images.sharing")

MAX_META_BYTES = 4 << 30
MAX_TABLE_BYTES = 1 << 30
_READ_BYTES = 8 << 20
T = TypeVar("T")
Report = Callable[[str, int, int], None]
"""Told a step, and how many of how many bytes of it are done."""


class Sharing:
    """One node's traffic with the store, but for the data itself, which the filler fetches."""

    def __init__(
        self, store: BlobStore, root: Path, layers: LayerStore, data: DataStore, *, direct: bool
    ) -> None:
        """Join a store and a node's layers.

        Args:
            store: opened by the caller, who closes it.
            root: of the node's images.
            layers: of the node.
            data: of the node.
            direct: publish data uncompressed too, for nodes that mount it from the store's own
                file system.
        """
        self.store = store
        self.direct = direct
        self._tmp = root.absolute() / "tmp"
        self._layers = layers
        self._data = data
        self._fetching = KeyedLock()

    # -- there --------------------------------------------------------------------------------

    async def publish_image(self, record: ImageRecord, report: Report) -> None:
        """Put an image and all it stands on into the store.

        Raises:
            Unavailable: the store does not answer, or is being collected.
            StorageFull: no room there.
        """
        async with publishing(self.store):
            await self._publish_image(record, report)

    async def _publish_image(self, record: ImageRecord, report: Report) -> None:
        wanted = list(dict.fromkeys([*record.layers, *record.mounts]))
        await self._publish_layers(wanted, report)
        refs = [ref for digest in wanted for ref in await self._document_refs(digest)]
        await self.store.put_document("image", record.name, encode(record), refs)

    async def publish_named(self, record: NamedLayer, report: Report) -> None:
        """Put a version of a workspace or toolkit into the store. Raises as `publish_image`."""
        async with publishing(self.store):
            await self._publish_layers([record.digest], report)
            refs = await self._document_refs(record.digest)
            await self.store.put_document(record.kind, record.name, encode(record), refs)

    async def _publish_layers(self, digests: Iterable[str], report: Report) -> None:
        for digest in digests:
            layer = await in_thread("disk", self._layers.get, digest)
            data = [await self._publish_data(device, report) for device in layer.devices]
            meta = await self._publish_meta(layer, report)
            stored = StoredLayer(layer=layer, meta=meta, data=data)
            await self.store.put_document("layer", digest, encode(stored), refs_of(stored))

    async def _document_refs(self, digest: str) -> list[BlobRef]:
        return refs_of(await self._stored(digest))

    async def _publish_data(self, digest: str, report: Report) -> DataRecord:
        record = await in_thread("disk", self._data.get, digest)
        if record.packed and await self._is_there(record):
            return record
        raw = await in_thread("disk", self._data.raw, digest)
        if raw is None:
            raise NotFound(f"data {digest} is neither here nor in the store", kind="data")
        async with self._scratch() as place:
            report("packing", 0, record.size_bytes)
            packed = await pack(
                raw, place, on_progress=lambda done: report("packing", done, record.size_bytes)
            )
            packed = msgspec.structs.replace(packed, raw=self.direct)
            await self._send(place / "pack", packed.pack, report)
            await self._send(place / "table", packed.table, report)
            if self.direct:
                await self._send(raw, BlobRef(digest, record.size_bytes), report)
            record = msgspec.structs.replace(record, packed=packed)
            await in_thread("disk", self._data.put_table, record, place / "table")
        return record

    async def _is_there(self, record: DataRecord) -> bool:
        packed = record.packed
        if packed is None or (self.direct and not packed.raw):
            return False
        wanted = [packed.table.digest, packed.pack.digest]
        return all([await self.store.has_blob(digest) for digest in wanted])

    async def _publish_meta(self, layer: LayerRecord, report: Report) -> BlobRef:
        async with self._scratch() as place:
            packed = place / "meta"
            ref = await in_thread("build", compress_file, self._layers.meta(layer.digest), packed)
            await self._send(packed, ref, report)
            return ref

    async def _send(self, file: Path, ref: BlobRef, report: Report) -> None:
        if not await self.store.has_blob(ref.digest):
            await self.store.put_blob(
                file, ref.digest, lambda done: report("publishing", done, ref.size_bytes)
            )

    # -- here ---------------------------------------------------------------------------------

    async def find_image(self, name: str) -> ImageRecord:
        """The image of a full name. Raises NotFound, Unavailable."""
        return await self._document("image", name, ImageRecord)

    async def find_named(self, kind: LayerKind, name: str) -> NamedLayer:
        """A version of a workspace or toolkit. Raises NotFound, Unavailable."""
        return await self._document(kind, name, NamedLayer)

    async def names(self, kind: DocumentKind) -> list[str]:
        """The names of all documents of a kind, sorted. Raises Unavailable."""
        return sorted([name async for name in self.store.list_documents(kind)])

    async def fetch_layers(self, digests: Iterable[str], owner: str) -> None:
        """Have layers here as far as a mount needs: metadata and tables, not the data.

        Args:
            digests: of the layers.
            owner: whose pins keep them; they stay pinned.

        Raises:
            NotFound: (kind layer) one is neither here nor there.
            DataUnavailable: what the store gives is not what it should be.
            Unavailable: the store does not answer.
        """
        wanted = list(dict.fromkeys(digests))
        self._layers.pins.pin(wanted, owner)
        await together(partial(self._fetch_layer, digest, owner) for digest in wanted)

    async def _fetch_layer(self, digest: str, owner: str) -> None:
        async with self._fetching.holding(digest):
            if self._layers.has(digest):  # one stat
                return
            stored = await self._stored(digest)
            self._data.pins.pin(stored.layer.devices, owner)
            async with self._scratch() as place:
                tables = [partial(self._fetch_table, record, place) for record in stored.data]
                await together([*tables, partial(self._fetch_meta, stored, place)])
                await in_thread("disk", self._layers.put, stored.layer, place / "meta.erofs")

    async def _fetch_meta(self, stored: StoredLayer, place: Path) -> None:
        packed, meta = place / "meta", place / "meta.erofs"
        await self._receive(stored.meta, packed, MAX_META_BYTES)
        await in_thread("build", decompress_file, packed, meta, stored.layer.meta, MAX_META_BYTES)

    async def _fetch_table(self, record: DataRecord, place: Path) -> None:
        if record.packed is None:
            raise DataUnavailable(f"the store does not say where data {record.digest} lies")
        if await in_thread("disk", self._data.has, record.digest):
            return
        table = place / f"table-{uuid.uuid4().hex}"
        await self._receive(record.packed.table, table, MAX_TABLE_BYTES)
        await in_thread("disk", self._data.put_table, record, table)

    async def _receive(self, ref: BlobRef, file: Path, limit: int) -> None:
        """Read a whole blob into a file; its digest is checked."""
        if not 0 <= ref.size_bytes <= limit:
            raise DataUnavailable(f"blob {ref.digest} claims {ref.size_bytes} bytes")
        parts = [
            await self.store.read_blob(ref.digest, at, min(_READ_BYTES, ref.size_bytes - at))
            for at in range(0, ref.size_bytes, _READ_BYTES)
        ]
        await in_thread("disk", _write_checked, b"".join(parts), ref, file)

    async def _stored(self, digest: str) -> StoredLayer:
        try:
            stored = await self._document("layer", digest, StoredLayer)
        except NotFound:
            raise NotFound(f"no layer {digest}", kind="layer") from None
        _check(stored, digest)
        return stored

    async def _document(self, kind: DocumentKind, name: str, type_: type[T]) -> T:
        body = await self.store.get_document(kind, name)
        return decode(body, type_, f"{kind} {name} in {self.store.url}")

    @contextlib.asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Path]:
        place = self._tmp / f"share-{uuid.uuid4().hex}"
        await in_thread("disk", lambda: place.mkdir(mode=0o700))
        try:
            with disk.full_disk_named(self._tmp):
                yield place
        finally:
            with anyio.CancelScope(shield=True):
                await in_thread("disk", disk.remove_tree, place)


def _check(stored: StoredLayer, digest: str) -> None:
    """What names files here, and what sizes buffers, is believed of nobody."""
    layer = stored.layer
    named = [layer.digest, layer.meta.digest, *layer.devices]
    for text in named:
        check_digest(text)
    if layer.digest != digest or [data.digest for data in stored.data] != layer.devices:
        raise DataUnavailable(f"the store's document of layer {digest} is about another one")


def _write_checked(content: bytes, ref: BlobRef, file: Path) -> None:
    if disk.digest_of_bytes(content) != ref.digest:
        raise DataUnavailable(f"blob {ref.digest} of the store does not match its digest")
    file.write_bytes(content)
