"""What may go from the store: all that no name, and no node, needs any more.

Roots are the documents of images, workspaces and toolkits, and the nodes' declarations of use.
Publishing and collecting exclude each other by intents: each puts its own before it looks for the
other's, so of two that begin together at least one sees the other. An intent nobody took back is
of a process that died; it counts for a stated time.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Literal, TypeVar

from msgspec import Struct, field

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import (
    Conflict,
    DsecError,
    NotFound,
    Unavailable,
    Unsupported,
)
from dsec.images.records import ImageRecord, NamedLayer, StoredLayer, decode, encode
from dsec.images.store.interface import BlobRef, BlobStore, DocumentKind
from dsec.wire.public_v1 import CollectReport

logger = logging.getLogger("dsec.images.collecting")

INTENT_LASTS_S = 6 * 3600.0
USE_LASTS_S = 7 * 86400.0
"""A node that has not said so for a week uses nothing."""
FRESH_BLOB_S = 3600.0
"""Younger blobs are left: a publisher that knows no intents may have put them."""


T = TypeVar("T")


class Intent(Struct, kw_only=True):
    """Somebody is about to do something to the store."""

    what: Literal["publish", "collect"]
    at: float


class Use(Struct, kw_only=True):
    """What a node's sandboxes stand on."""

    node: str
    at: float
    layers: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def publishing(store: BlobStore, clock: Clock | None = None) -> AsyncIterator[None]:
    """Keep collectors out meanwhile.

    Raises:
        Unavailable: the store is being collected; try again later.
    """
    clock = clock or SystemClock()
    async with _intending(store, "publish", clock) as others:
        if any(other.what == "collect" for other in others):
            raise Unavailable(f"{store.url} is being collected; publish again in a moment")
        yield


@contextlib.asynccontextmanager
async def _intending(
    store: BlobStore, what: Literal["publish", "collect"], clock: Clock
) -> AsyncIterator[list[Intent]]:
    mine = f"{what}-{uuid.uuid4().hex}"
    await store.put_document("intent", mine, encode(Intent(what=what, at=clock.now())), [])
    try:
        yield await _others(store, mine, clock)
    finally:
        with contextlib.suppress(DsecError):  # it counts for a while, no harm otherwise
            await store.delete_document("intent", mine)


async def _others(store: BlobStore, mine: str, clock: Clock) -> list[Intent]:
    found = []
    async for name in store.list_documents("intent"):
        if name == mine:
            continue
        with contextlib.suppress(NotFound):
            body = await store.get_document("intent", name)
            intent = decode(body, Intent, f"intent {name} in {store.url}")
            if clock.now() - intent.at < INTENT_LASTS_S:
                found.append(intent)
            else:
                await store.delete_document("intent", name)
    return found


async def collect(store: BlobStore, clock: Clock, *, dry_run: bool) -> CollectReport:
    """Remove layers and blobs nothing needs.

    Raises:
        Conflict: somebody publishes or collects now.
        Unavailable: the store does not answer.
    """
    async with _intending(store, "collect", clock) as others:
        if others:
            raise Conflict(f"{store.url} is being changed by somebody else; collect later")
        return await _Collection(store, clock, dry_run=dry_run).run()


class _Collection:
    """One collection under way."""

    def __init__(self, store: BlobStore, clock: Clock, *, dry_run: bool) -> None:
        self._store = store
        self._clock = clock
        self._dry_run = dry_run
        self._needed_layers: set[str] = set()
        self._needed_blobs: set[str] = set()

    async def run(self) -> CollectReport:
        """Do it; documents go before the blobs they name."""
        await self._find_needed()
        dropped = await self._drop_layers()
        return await self._drop_blobs(dropped)

    async def _find_needed(self) -> None:
        async for image in self._each("image", ImageRecord):
            self._needed_layers.update([*image.layers, *image.mounts])
        kinds: tuple[DocumentKind, DocumentKind] = ("workspace", "toolkit")
        for kind in kinds:
            async for named in self._each(kind, NamedLayer):
                self._needed_layers.add(named.digest)
        async for use in self._each("use", Use):
            if self._clock.now() - use.at < USE_LASTS_S:
                self._needed_layers.update(use.layers)

    async def _each(self, kind: DocumentKind, type_: type[T]) -> AsyncIterator[T]:
        async for name in self._store.list_documents(kind):
            with contextlib.suppress(NotFound):
                body = await self._store.get_document(kind, name)
                yield decode(body, type_, f"{kind} {name} in {self._store.url}")

    async def _drop_layers(self) -> int:
        dropped = 0
        names = [name async for name in self._store.list_documents("layer")]
        for name in names:
            stored = decode(
                await self._store.get_document("layer", name), StoredLayer, f"layer {name}"
            )
            if name in self._needed_layers:
                self._needed_blobs.update(ref.digest for ref in refs_of(stored))
                continue
            dropped += 1
            if not self._dry_run:
                await self._store.delete_document("layer", name)
        return dropped

    async def _drop_blobs(self, dropped: int) -> CollectReport:
        report = CollectReport(dry_run=self._dry_run, blobs=0, bytes=0, kept_blobs=0)
        try:
            blobs = [blob async for blob in self._store.list_blobs()]
        except Unsupported as error:
            report.detail = f"{dropped} layers; {error.message}"
            return report
        old = self._clock.now() - FRESH_BLOB_S
        for blob in blobs:
            if blob.digest in self._needed_blobs or blob.modified_at > old:
                report.kept_blobs += 1
                continue
            report.blobs += 1
            report.bytes += blob.size_bytes
            if not self._dry_run:
                await self._store.delete_blob(blob.digest)
        report.detail = f"{dropped} layers"
        return report


def refs_of(stored: StoredLayer) -> list[BlobRef]:
    """The blobs a stored layer needs."""
    refs = [stored.meta]
    for data in stored.data:
        if data.packed:
            refs += [data.packed.pack, data.packed.table]
            refs += [BlobRef(data.digest, data.size_bytes)] if data.packed.raw else []
    return refs
