"""Environments in the shared store: published whole, found by name, fetched as far as a mount needs.

What is published never changes; a name may come to mean something else. To publish again is
harmless and goes on where an interrupted try ended: a layer that is there whole stays as it is,
blobs that are there are not sent again. Documents come last, so what can be found can be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from pathlib import Path

import anyio

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import Conflict, DataUnavailable, InternalError, NotFound
from dsec.images import disk
from dsec.images.data import DataStore
from dsec.images.intents import publishing
from dsec.images.layers import LayerStore
from dsec.images.locks import KeyedLock
from dsec.images.pack import decompress_file
from dsec.images.records import DataRecord, ImageRecord, NamedLayer, StoredLayer, decode, encode
from dsec.images.sending import Report, Sending
from dsec.images.store.interface import BlobRef, BlobStore
from dsec.images.store.several import several
from dsec.images.store_names import NameKind, StoreNames
from dsec.images.stored import MAX_META_BYTES, check_stored, refs_of
from dsec.kit.blocking import in_thread
from dsec.kit.together import together

logger = logging.getLogger("dsec.images.sharing")

_READ_BYTES = 8 << 20
_TRIES = 5


class Sharing:
    """One node's traffic with the store, but for the data itself, which the filler fetches."""

    def __init__(
        self,
        store: BlobStore,
        root: Path,
        layers: LayerStore,
        data: DataStore,
        *,
        direct: bool,
        clock: Clock | None = None,
    ) -> None:
        """Join a store and a node's layers.

        Args:
            store: opened by the caller, who closes it.
            root: of the node's images.
            layers: of the node.
            data: of the node.
            direct: publish data uncompressed too, for nodes that mount it from the store's own
                file system.
            clock: the node's.
        """
        self.store = store
        self.direct = direct
        self._clock = clock or SystemClock()
        self.names = StoreNames(store, self._clock)
        self._tmp = root.absolute() / "tmp"
        self._layers = layers
        self._data = data
        self._sending = Sending(store, layers, data, direct=direct)
        self._fetching = KeyedLock()

    # -- there --------------------------------------------------------------------------------

    async def publish_image(
        self, record: ImageRecord, report: Report, *, absent: bool = False
    ) -> None:
        """Put an image and all it stands on into the store; the name means it from then on.

        Args:
            record: the image.
            report: is told the progress.
            absent: the name is to mean nothing else yet.

        Raises:
            Conflict: `absent`, and it does.
            NotFound: (kind layer, data) it is neither here nor in the store.
            Unavailable: the store does not answer, or is being collected.
            StorageFull: no room there.
        """
        wanted = list(dict.fromkeys([*record.layers, *record.mounts]))
        async with publishing(self.store, self._clock):
            refs = [ref for digest in wanted for ref in await self._publish_layer(digest, report)]
            await self.store.put_document("image", record.name, encode(record), refs, absent=absent)
        self.names.changed("image", record.name)

    async def publish_named(self, record: NamedLayer, report: Report) -> NamedLayer:
        """Put a version of a workspace or toolkit into the store, if it is not there.

        Returns:
            What the store has now: this record, or an earlier one of the same content.

        Raises:
            Conflict: the version is there with another content.
            And as `publish_image`.
        """
        async with publishing(self.store, self._clock):
            refs = await self._publish_layer(record.digest, report)
            with contextlib.suppress(Conflict):
                await self.store.put_document(
                    record.kind, record.name, encode(record), refs, absent=True
                )
            return await self._same(record)

    async def _same(self, record: NamedLayer) -> NamedLayer:
        self.names.changed(record.kind, record.name)
        found = await self.names.named(record.kind, record.name)
        if found.digest != record.digest:
            raise another_content(found)
        return found

    async def _publish_layer(self, digest: str, report: Report) -> list[BlobRef]:
        """Have a layer in the store, whole; the blobs it needs.

        What the document names already others may have mounted: it is added to, never replaced
        by what this node would have made.
        """
        for _ in range(_TRIES):
            known, absent = await self._published(digest)
            async with self._scratch() as place:
                stored = await self._sending.complete(digest, known, place, report)
            with contextlib.suppress(Conflict):  # another node was first: see what it put there
                if stored != known:
                    refs = refs_of(stored)
                    await self.store.put_document(
                        "layer", digest, encode(stored), refs, absent=absent
                    )
                return refs_of(stored)
        raise Conflict(f"layer {digest} of {self.store.url} is being published by others")

    async def _published(self, digest: str) -> tuple[StoredLayer | None, bool]:
        """What the store's document of a layer says, and whether there is none."""
        try:
            return await self._stored(digest), False
        except NotFound:
            return None, True
        except DataUnavailable as error:  # nobody can use it: what is made here is better
            logger.warning("a document is replaced", extra={"why": error.message})
            return None, False

    async def forget(self, kind: NameKind, name: str, digest: str) -> None:
        """Remove a name from the store, if it still means what the caller resolved.

        Args:
            kind: of the name.
            name: in full.
            digest: of the image, or of the layer, it is to mean.

        Raises:
            Unsupported: the store does not let documents be deleted.
            Unavailable: it does not answer.
        """
        self.names.changed(kind, name)
        try:
            found = await self.names.find(kind, name)
        except NotFound:
            return
        if found.digest == digest:
            await self.store.delete_document(kind, name)
        self.names.changed(kind, name)

    # -- here ---------------------------------------------------------------------------------

    async def fetch_layers(self, digests: Iterable[str], owner: str) -> None:
        """Have layers here as far as a mount needs: metadata and tables, not the data.

        Args:
            digests: of the layers.
            owner: whose pins keep the layers; they stay pinned.

        Raises:
            NotFound: (kind layer) one is neither here nor there.
            DataUnavailable: what the store gives is not what it should be.
            Unavailable: the store does not answer.
        """
        wanted = list(dict.fromkeys(digests))
        self._layers.pins.pin(wanted, owner)
        await together(partial(self._fetch_layer, digest) for digest in wanted)

    async def still_there(self, digests: Iterable[str]) -> None:
        """See that the store still has layers this node knows, after it has declared them again.

        A layer that nobody declared for a while may have been collected, and then its data with
        it, though its metadata is here.

        Raises:
            NotFound: (kind layer) the store has one no more.
            DataUnavailable, Unavailable: as `fetch_layers`.
        """
        await several(partial(self._stored, digest) for digest in dict.fromkeys(digests))

    async def _fetch_layer(self, digest: str) -> None:
        async with self._fetching.holding(digest):
            if await in_thread("disk", self._is_here, digest):
                return
            stored = await self._stored(digest)
            with self._data_kept(stored):
                async with self._scratch() as place:
                    tables = [partial(self._fetch_table, record, place) for record in stored.data]
                    await together([*tables, partial(self._fetch_meta, stored, place)])
                    put = partial(self._layers.put, sync=False)  # the store has it, too
                    await in_thread("disk", put, stored.layer, place / "meta.erofs")

    def _is_here(self, digest: str) -> bool:
        """Whether the layer is, and all its data is known."""
        try:
            return all(self._data.has(device) for device in self._layers.get(digest).devices)
        except NotFound:
            return False

    @contextlib.contextmanager
    def _data_kept(self, stored: StoredLayer) -> Iterator[None]:
        """Pin the data until the layer is here, which needs it from then on."""
        owner = f"fetch-{uuid.uuid4().hex}"
        self._data.pins.pin(stored.layer.devices, owner)
        try:
            yield
        finally:
            self._data.pins.unpin(owner)

    async def _fetch_meta(self, stored: StoredLayer, place: Path) -> None:
        packed, meta = place / "meta", place / "meta.erofs"
        await self._receive(stored.meta, packed)
        await in_thread("build", decompress_file, packed, meta, stored.layer.meta, MAX_META_BYTES)

    async def _fetch_table(self, record: DataRecord, place: Path) -> None:
        if record.packed is None or await in_thread("disk", self._data.has, record.digest):
            return
        table = place / f"table-{uuid.uuid4().hex}"
        await self._receive(record.packed.table, table)
        await in_thread("disk", self._data.put_table, record, table)

    async def _receive(self, ref: BlobRef, file: Path) -> None:
        """Write a whole blob into a file, a part at a time; its size has been judged.

        Raises:
            DataUnavailable: it is not there, or another than its digest says.
        """
        hashed = hashlib.sha256()
        await in_thread("disk", file.touch)
        for at in range(0, ref.size_bytes, _READ_BYTES):
            length = min(_READ_BYTES, ref.size_bytes - at)
            try:
                part = await self.store.read_blob(ref.digest, at, length)
            except NotFound as error:
                raise DataUnavailable(f"{self.store.url}: {error.message}") from error
            await in_thread("disk", _append, file, part, hashed)
        if f"sha256:{hashed.hexdigest()}" != ref.digest:
            raise DataUnavailable(f"blob {ref.digest} of the store does not match its digest")

    async def _stored(self, digest: str) -> StoredLayer:
        what = f"layer {digest} in {self.store.url}"
        try:
            stored = decode(await self.store.get_document("layer", digest), StoredLayer, what)
        except NotFound:
            raise NotFound(f"no layer {digest}", kind="layer") from None
        except InternalError as error:
            raise DataUnavailable(error.message) from error
        check_stored(stored, digest)
        return stored

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


def another_content(known: NamedLayer) -> Conflict:
    """The error for a version that is there already and means something else."""
    return Conflict(
        f"{known.kind} {known.name} exists with another content; versions do not change: "
        "publish under a new one",
        kind=known.kind,
        name=known.name,
    )


def _append(file: Path, part: bytes, hashed: hashlib._Hash) -> None:
    hashed.update(part)
    with file.open("ab") as out:
        out.write(part)
