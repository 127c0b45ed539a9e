"""What may go from the store: all that no name, and no node, needs any more.

Roots are the documents of images, workspaces and toolkits, and the nodes' declarations of use.
Publishers are kept out (`intents.py`); nodes are not, so declarations are read again before
anything goes. A node declares a layer before it reads the layer's document: whoever still found
the document is seen before its blobs would go, and a document that went in just that moment is put
back. What cannot be read might name anything, so then nothing it might name is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import Struct, field

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, DataUnavailable, InternalError, NotFound, Unsupported
from dsec.images.intents import intending
from dsec.images.records import ImageRecord, KeptTrajectory, NamedLayer, StoredLayer, decode, encode
from dsec.images.store.interface import BlobStore, DocumentKind, FoundBlob
from dsec.images.store.several import AT_ONCE, several
from dsec.images.stored import check_stored, refs_of
from dsec.wire.public_v1 import CollectReport

logger = logging.getLogger("dsec.images.collecting")

USE_LASTS_S = 7 * 86400.0
"""A node that has not said so for a week uses nothing."""
TRAJECTORY_LASTS_S = 30 * 86400.0
"""Older trajectories of ended sandboxes go."""
FRESH_BLOB_S = 3600.0
"""Younger blobs are left: a publisher that knows no intents may have put them."""
T = TypeVar("T")


class Use(Struct, kw_only=True):
    """What a node's sandboxes stand on."""

    node: str
    at: float
    layers: list[str] = field(default_factory=list)


async def collect(store: BlobStore, clock: Clock, *, dry_run: bool) -> CollectReport:
    """Remove layers and blobs nothing needs.

    What cannot be read stays, and whatever it may need; the report's `detail` names it.

    Raises:
        Conflict: somebody publishes or collects now.
        Unavailable: the store does not answer.
    """
    async with intending(store, "collect", clock) as others:
        if others:
            raise Conflict(f"{store.url} is being changed by somebody else; collect later")
        return await _Collection(store, clock, dry_run=dry_run).run()


@dataclass(frozen=True, slots=True)
class _Blobs:
    """What is to become of the store's blobs."""

    doomed: list[FoundBlob]
    kept: int
    detail: str = ""


class _Collection:
    """One collection under way."""

    def __init__(self, store: BlobStore, clock: Clock, *, dry_run: bool) -> None:
        self._store = store
        self._clock = clock
        self._dry_run = dry_run
        self._needed: set[str] = set()
        """Layers; it only grows."""
        self._stored: dict[str, StoredLayer] = {}
        """Layers of the store whose documents could be read."""
        self._odd: dict[str, None] = {}
        """Documents that could not be read, in words."""

    async def run(self) -> CollectReport:
        """Do it; documents go before the blobs they name."""
        await self._look_around()
        await self._read_layers()
        gone = await self._drop_layers()
        doomed = await self._doomed_blobs(gone)
        return await self._drop_blobs(doomed, len(gone))

    # -- what is needed -----------------------------------------------------------------------

    async def _look_around(self) -> None:
        """Learn what names and nodes need now."""
        for image in await self._all("image", ImageRecord):
            self._needed.update([*image.layers, *image.mounts])
        kinds: tuple[DocumentKind, DocumentKind] = ("workspace", "toolkit")
        for kind in kinds:
            self._needed.update([named.digest for named in await self._all(kind, NamedLayer)])
        for use in await self._all("use", Use):
            if self._clock.now() - use.at < USE_LASTS_S:
                self._needed.update(use.layers)

    async def _read_layers(self) -> None:
        if self._odd:  # anything may be needed
            return
        for stored in await self._all("layer", StoredLayer):
            self._stored[stored.layer.digest] = stored

    async def _all(self, kind: DocumentKind, type_: type[T]) -> list[T]:
        """The documents of a kind that can be read."""
        found: list[T] = []

        async def read(name: str) -> None:
            record = await self._read(kind, name, type_)
            if record is not None:
                found.append(record)

        names = [name async for name in self._store.list_documents(kind)]
        await several(partial(read, name) for name in names)
        return found

    async def _read(self, kind: DocumentKind, name: str, type_: type[T]) -> T | None:
        try:
            body = await self._store.get_document(kind, name)
            record = decode(body, type_, f"{kind} {name} in {self._store.url}")
            if isinstance(record, StoredLayer):
                check_stored(record, name)
        except NotFound:
            return None  # deleted since it was listed
        except (DataUnavailable, InternalError) as error:
            logger.warning("a document cannot be read", extra={"why": error.message})
            self._odd[f"{kind} {name}"] = None
            return None
        return record

    # -- documents of layers ------------------------------------------------------------------

    async def _drop_layers(self) -> list[str]:
        """Remove what nobody needs; the digests of the layers that are gone."""
        doomed = sorted(self._stored.keys() - self._needed)
        if self._dry_run:
            return doomed
        gone = []
        for start in range(0, len(doomed), AT_ONCE):
            some = doomed[start : start + AT_ONCE]
            await self._look_around()
            still = [] if self._odd_roots() else [d for d in some if d not in self._needed]
            await several(partial(self._store.delete_document, "layer", d) for d in still)
            gone += still
        return await self._put_back(gone)

    async def _put_back(self, gone: Collection[str]) -> list[str]:
        """Have the documents of layers again that were declared in the moment they went."""
        if not gone:
            return []
        await self._look_around()
        back = set(gone) if self._odd_roots() else self._needed.intersection(gone)
        for digest in back:
            stored = self._stored[digest]
            await self._store.put_document("layer", digest, encode(stored), refs_of(stored))
        return [digest for digest in gone if digest not in back]

    def _odd_roots(self) -> bool:
        return any(not what.startswith("layer ") for what in self._odd)

    # -- blobs --------------------------------------------------------------------------------

    async def _doomed_blobs(self, gone: Collection[str]) -> _Blobs:
        try:
            found = [blob async for blob in self._store.list_blobs()]
        except Unsupported as error:
            return _Blobs([], 0, error.message)
        needed = await self._trajectories()
        if self._odd:
            return _Blobs([], len(found), f"no blobs: {', '.join(self._odd)} cannot be read")
        kept = [stored for digest, stored in self._stored.items() if digest not in gone]
        needed |= {ref.digest for stored in kept for ref in refs_of(stored)}
        old = self._clock.now() - FRESH_BLOB_S
        doomed = [b for b in found if b.digest not in needed and b.modified_at <= old]
        return _Blobs(doomed, len(found) - len(doomed))

    async def _trajectories(self) -> set[str]:
        """Blobs of trajectories that are kept; the documents of the others go."""
        oldest = self._clock.now() - TRAJECTORY_LASTS_S
        found = await self._all("trajectory", KeptTrajectory)
        old = [kept.sandbox for kept in found if kept.kept_at < oldest]
        if not self._dry_run:
            delete = partial(self._store.delete_document, "trajectory")
            await several(partial(delete, sandbox) for sandbox in old)
        return {kept.blob.digest for kept in found if kept.kept_at >= oldest}

    async def _drop_blobs(self, blobs: _Blobs, layers: int) -> CollectReport:
        if not self._dry_run:
            await several(partial(self._store.delete_blob, b.digest) for b in blobs.doomed)
        return CollectReport(
            dry_run=self._dry_run,
            blobs=len(blobs.doomed),
            bytes=sum(blob.size_bytes for blob in blobs.doomed),
            kept_blobs=blobs.kept,
            detail="; ".join(filter(None, [f"{layers} layers", blobs.detail])),
        )
