"""Where the kernel finds the data of a layer: here, in the store's own file system, or on demand."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from dsec.base.errors import InternalError, NotFound, Unsupported
from dsec.images.data import DataStore
from dsec.images.lazy.client import FillerClient
from dsec.images.lazy.node import NodeFiller
from dsec.images.locks import KeyedLock
from dsec.images.pack import CHUNK_BYTES
from dsec.images.records import DataRecord
from dsec.images.store.interface import BlobStore
from dsec.kit.blocking import in_thread
from dsec.kit.together import together
from dsec.wire.filler import OpenData, Prefetch, StartRecording

logger = logging.getLogger("dsec.images.devices")


class Devices:
    """The data devices of a node.

    Whole data on this disk comes first; then the store's, where it lies uncompressed on a mounted
    file system; else the filler shows a file and fetches what is read.
    """

    def __init__(self, data: DataStore, store: BlobStore | None, filler: NodeFiller | None) -> None:
        self._data = data
        self._store = store
        self._filler = filler
        self._opening = KeyedLock()
        self._open: dict[str, Path] = {}
        """What the filler shows now."""
        self._claims: Counter[str] = Counter()
        """What somebody is about to mount."""

    async def filler(self) -> FillerClient:
        """The node's filler, started if it is not running yet.

        Raises:
            Unsupported: the node has none.
            Unavailable: it cannot be started.
        """
        if self._filler is None:
            raise Unsupported("this node has no filler: data is loaded whole, nothing is recorded")
        return await self._filler.client()

    async def adopt(self) -> bool:
        """Learn what a filler that outlived the edge shows; whether there is one."""
        if self._filler is None or not await self._filler.find():
            return False
        status = await (await self.filler()).status()
        self._open = {entry.digest: Path() for entry in status.data}
        return True

    def forget(self) -> None:
        """The filler is another one, and shows nothing yet."""
        self._open.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing is shown by the filler."""
        return not self._open

    def is_lazy(self, digest: str) -> bool:
        """Whether it is fetched when it is read. Looks at the disk."""
        return self._data.raw(digest) is None and self._direct(self._data.get(digest)) is None

    @property
    def shown(self) -> frozenset[str]:
        """What the filler shows."""
        return frozenset(self._open)

    @contextlib.asynccontextmanager
    async def ready(self, digests: Sequence[str]) -> AsyncIterator[list[Path]]:
        """The devices, in this order; they stay while the context lasts, for a mount to be made.

        Raises:
            NotFound: (kind data) one is not known here.
            Unavailable: the filler does not answer.
        """
        self._claims.update(digests)
        try:
            yield await self._paths(digests)
        finally:
            self._claims.subtract(digests)

    async def _paths(self, digests: Sequence[str]) -> list[Path]:
        found: dict[str, Path] = {}

        async def find(digest: str) -> None:
            found[digest] = await self._path(digest)

        await together(partial(find, digest) for digest in set(digests))
        return [found[digest] for digest in digests]

    async def _path(self, digest: str) -> Path:
        if raw := self._data.raw(digest):  # one stat
            return raw
        record = await in_thread("disk", self._data.get, digest)
        return self._direct(record) or await self._on_demand(record)

    def _direct(self, record: DataRecord) -> Path | None:
        if self._store is None or record.packed is None or not record.packed.raw:
            return None
        return self._store.blob_path(record.digest)

    async def _on_demand(self, record: DataRecord) -> Path:
        async with self._opening.holding(record.digest):
            path = await (await self.filler()).open(self._request(record))
            self._open[record.digest] = path
            return path

    def _request(self, record: DataRecord) -> OpenData:
        table = self._data.table(record.digest)
        if record.packed is None or table is None:
            raise NotFound(f"nobody knows where data {record.digest} lies", kind="data")
        return OpenData(
            digest=record.digest,
            size_bytes=record.size_bytes,
            chunk_bytes=record.packed.chunk_bytes,
            pack=record.packed.pack.digest,
            pack_bytes=record.packed.pack.size_bytes,
            table=str(table),
        )

    async def record(self, recording: str, digests: Sequence[str]) -> list[Path]:
        """Devices of their own for one sandbox, whose reads are written down.

        Raises:
            Unsupported: the node has no filler.
        """
        wanted = list(dict.fromkeys(digests))
        self._claims.update(wanted)
        try:
            await together(partial(self._show, digest) for digest in wanted)
            request = StartRecording(recording=recording, digests=wanted)
            paths = await (await self.filler()).start_recording(request)
        finally:
            self._claims.subtract(wanted)
        if len(paths) != len(wanted):
            raise InternalError("the filler gave another number of devices than it was asked for")
        found = dict(zip(wanted, paths, strict=True))
        return [found[digest] for digest in digests]

    async def prefetch(self, wanted: Prefetch) -> None:
        """Have chunks fetched ahead; data that is here whole needs none.

        Raises:
            NotFound: (kind data) it is not known here.
            Unavailable: the filler does not answer.
        """
        if await in_thread("disk", self.is_lazy, wanted.digest):
            await self._path(wanted.digest)
            await (await self.filler()).prefetch(wanted)

    async def _show(self, digest: str) -> None:
        """Have the filler know it, also when it is here whole."""
        record = await in_thread("disk", self._data.get, digest)
        whole = self._data.raw(digest) or self._direct(record)
        if whole is None:
            await self._on_demand(record)
            return
        async with self._opening.holding(digest):
            request = OpenData(
                digest=digest, size_bytes=record.size_bytes, chunk_bytes=CHUNK_BYTES, raw=str(whole)
            )
            self._open[digest] = await (await self.filler()).open(request)

    async def close_unused(self, needed: Callable[[], Collection[str]]) -> None:
        """Have the filler show no more than what is needed.

        Args:
            needed: what layers that are mounted need, now; asked again for each.

        Raises:
            Unavailable: the filler does not answer.
        """
        for digest in list(self._open):
            async with self._opening.holding(digest):
                if not self._claims[digest] and digest not in needed():
                    del self._open[digest]
                    await (await self.filler()).close(digest)
