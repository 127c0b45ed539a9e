"""Names as the store has them, remembered for a moment.

They are not this node's: another may move or remove them, so nothing of them is kept on the disk.
What the store said counts for ten seconds; then it is asked again, by one for all who ask at that
time, and if it does not answer what it said last is used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, TypeVar, overload

import anyio

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import DataUnavailable, DsecError, InternalError, InvalidRequest, NotFound
from dsec.images.names import image_name, is_snapshot
from dsec.images.records import ImageRecord, NamedLayer, check_digest, decode
from dsec.images.remembered import Remembered
from dsec.images.store.interface import BlobStore
from dsec.images.store.several import several
from dsec.wire.public_v1 import LayerKind

logger = logging.getLogger("dsec.images.store_names")

LISTING_S = 2.0
"""What a list waits for the store."""
NameKind = Literal["image", "workspace", "toolkit"]
T = TypeVar("T")


class StoreNames:
    """The names of images, workspaces and toolkits in a store."""

    def __init__(self, store: BlobStore, clock: Clock | None = None) -> None:
        self._store = store
        clock = clock or SystemClock()
        self._images: Remembered[str, ImageRecord] = Remembered(clock)
        self._named: Remembered[tuple[LayerKind, str], NamedLayer] = Remembered(clock)
        self._lists: Remembered[NameKind, list[str]] = Remembered(clock)

    async def image(self, name: str) -> ImageRecord:
        """The image of a full name.

        Raises:
            NotFound: (kind image) there is none.
            DataUnavailable: what the store has there is no image of this name.
            Unavailable: the store does not answer, and never said.
        """
        return await self._images.get(name, partial(self._read_image, name))

    async def named(self, kind: LayerKind, name: str) -> NamedLayer:
        """A version of a workspace or toolkit. Raises as `image`, with its own kind."""
        return await self._named.get((kind, name), partial(self._read_named, kind, name))

    async def find(self, kind: NameKind, name: str) -> ImageRecord | NamedLayer:
        """What a name of any kind means. Raises as `image`."""
        return await (self.image(name) if kind == "image" else self.named(kind, name))

    async def names(self, kind: NameKind) -> list[str]:
        """All names of a kind, sorted.

        Raises:
            Unavailable: the store does not answer, and never said.
        """
        return await self._lists.get(kind, partial(self._list, kind))

    @overload
    async def all(
        self, kind: Literal["image"], wanted: Callable[[str], bool] = ...
    ) -> list[ImageRecord]: ...
    @overload
    async def all(self, kind: LayerKind) -> list[NamedLayer]: ...

    async def all(
        self, kind: NameKind, wanted: Callable[[str], bool] = lambda _: True
    ) -> list[ImageRecord] | list[NamedLayer]:
        """What all names of a kind mean, by name, as far as it can be learned in two seconds.

        A store that does not answer, and a document that is odd or gone, are no error here.

        Args:
            kind: of the names.
            wanted: which of them.
        """
        with anyio.move_on_after(LISTING_S) as patience, contextlib.suppress(DsecError):
            names = filter(wanted, await self.names(kind))
            await several(partial(self._learn, kind, name) for name in names)
        if patience.cancelled_caught:
            logger.warning("the store was not waited for", extra={"kind": kind})
        names = filter(wanted, self._lists.last(kind) or [])
        if kind == "image":
            return [image for name in names if (image := self._images.last(name))]
        return [named for name in names if (named := self._named.last((kind, name)))]

    async def versions(self, kind: LayerKind, path: str) -> list[NamedLayer]:
        """All versions of a path that can be read, by name.

        Raises:
            Unavailable: the store does not answer, and never said.
        """
        names = [name for name in await self.names(kind) if name.rpartition(":")[0] == path]
        await several(partial(self._learn, kind, name) for name in names)
        return [record for name in names if (record := self._named.last((kind, name)))]

    def digests(self) -> set[str]:
        """The layers that the names mean which were asked for, as far as was said last."""
        images = [digest for i in self._images.values() for digest in (*i.layers, *i.mounts)]
        return {*images, *(named.digest for named in self._named.values())}

    def changed(self, kind: NameKind, name: str) -> None:
        """Ask anew the next time: the name was published or removed from here."""
        self._lists.age(kind)
        if kind == "image":
            self._images.drop([name])
        else:
            self._named.drop([(kind, name)])

    async def _learn(self, kind: NameKind, name: str) -> None:
        with contextlib.suppress(DsecError):
            await self.find(kind, name)

    async def _list(self, kind: NameKind) -> list[str]:
        names = {name async for name in self._store.list_documents(kind)}
        if kind == "image":
            self._images.drop([name for name in self._images.known() if name not in names])
        else:
            gone = [key for key in self._named.known() if key[0] == kind and key[1] not in names]
            self._named.drop(gone)
        return sorted(names)

    async def _read_image(self, name: str) -> ImageRecord:
        with _as_said(f"image {name}"):
            record = await self._read("image", name, ImageRecord)
            if record.name != name or image_name(name) != name or not record.layers:
                raise InvalidRequest(f"it is about {record.name!r}")
            for digest in [*record.layers, *record.mounts, *_of_snapshot(record)]:
                check_digest(digest)
        return record

    async def _read_named(self, kind: LayerKind, name: str) -> NamedLayer:
        with _as_said(f"{kind} {name}"):
            record = await self._read(kind, name, NamedLayer)
            if (record.kind, record.name) != (kind, name) or image_name(name) != name:
                raise InvalidRequest(f"it is about {record.kind} {record.name!r}")
            check_digest(record.digest)
        return record

    async def _read(self, kind: NameKind, name: str, type_: type[T]) -> T:
        try:
            body = await self._store.get_document(kind, name)
        except NotFound:
            raise NotFound(f"no {kind} {name!r} in the store", kind=kind, name=name) from None
        return decode(body, type_, f"{kind} {name} in {self._store.url}")


def _of_snapshot(record: ImageRecord) -> list[str]:
    """What a snapshot's own record names; other images have none.

    Raises:
        InvalidRequest: it is no image of a snapshot's name, or the other way round.
    """
    snapshot = record.snapshot
    if is_snapshot(record.name) != (snapshot is not None):
        raise InvalidRequest("its name and what it says do not go together")
    if snapshot is None:
        return []
    if not snapshot.differences or not snapshot.parts:
        raise InvalidRequest("it is of no difference")
    return [*snapshot.differences, *(d for part in snapshot.parts for d in part.layers)]


@contextlib.contextmanager
def _as_said(what: str) -> Iterator[None]:
    """What the store says is judged; that it is odd is no fault of whoever asks.

    Raises:
        DataUnavailable: it is.
    """
    try:
        yield
    except (InternalError, InvalidRequest) as error:
        raise DataUnavailable(f"the store's document of {what} is odd: {error.message}") from error
