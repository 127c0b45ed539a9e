"""Workspaces and toolkits: layers with a name and a version, put over an image at creation.

A version never changes. To publish the same content under the same version again is harmless.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, InvalidRequest, NotFound, Unavailable
from dsec.images.importer import Importer
from dsec.images.jobs import Job
from dsec.images.layers import LayerStore
from dsec.images.names import image_name
from dsec.images.records import LayerRecord, NamedLayer
from dsec.images.sharing import Sharing
from dsec.images.shelf import Shelf
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import LayerKind, LayerView

KINDS: tuple[LayerKind, LayerKind] = ("workspace", "toolkit")


def split_version(name: str) -> tuple[str, str]:
    """A layer's path and version, "" if none is given.

    Raises:
        InvalidRequest: it is no name.
    """
    full = image_name(name)
    path, _, version = full.rpartition(":")
    given = name.endswith(f":{version}") and name != path
    return path, version if given else ""


class Publications:
    """The named layers of a node, those of the store included."""

    def __init__(
        self,
        root: Path,
        layers: LayerStore,
        importer: Importer,
        sharing: Sharing | None,
        clock: Clock,
    ) -> None:
        scratch = root.absolute() / "tmp"
        named = root.absolute() / "named"
        self._shelves: Mapping[LayerKind, Shelf[NamedLayer]] = {
            kind: Shelf(named / kind, scratch, kind, NamedLayer) for kind in KINDS
        }
        self._layers = layers
        self._importer = importer
        self._sharing = sharing
        self._clock = clock

    def open(self) -> None:
        """Read the records. Blocking. Raises InternalError: one is damaged."""
        for shelf in self._shelves.values():
            shelf.open()

    def digests(self) -> set[str]:
        """Layers that some name means."""
        return {record.digest for shelf in self._shelves.values() for record in shelf.records()}

    async def find(self, kind: LayerKind, name: str) -> NamedLayer:
        """The layer of a name; without a version, the one published last.

        Raises:
            InvalidRequest: it is no name.
            NotFound: (kind workspace, toolkit) it is neither here nor in the store.
            Unavailable: it is not here, and the store does not answer.
        """
        path, version = split_version(name)
        shelf = self._shelves[kind]
        if version:
            return shelf.find(name) or await self._from_store(kind, f"{path}:{version}")
        newest = await self._newest(kind, path)
        if newest is None:
            raise shelf.missing(name)
        return newest

    async def _from_store(self, kind: LayerKind, name: str) -> NamedLayer:
        shelf = self._shelves[kind]
        if self._sharing is None:
            raise shelf.missing(name)
        try:
            record = await self._sharing.find_named(kind, name)
        except NotFound:
            raise shelf.missing(name) from None
        await in_thread("disk", shelf.put, record)
        return record

    async def _newest(self, kind: LayerKind, path: str) -> NamedLayer | None:
        await self._learn(kind, path)
        return self._shelves[kind].newest(path)

    async def _learn(self, kind: LayerKind, path: str) -> None:
        """Read what the store has of a path, or of all, and this node does not know yet."""
        names = await self._sharing.names(kind) if self._sharing is not None else []
        for name in names:
            of_path = not path or name.rpartition(":")[0] == path
            if of_path and self._shelves[kind].find(name) is None:
                with contextlib.suppress(NotFound):
                    await self._from_store(kind, name)

    async def list(self, kind: LayerKind | None) -> list[LayerView]:
        """All of one kind or both, by name; the store's included."""
        found = []
        for one in KINDS if kind is None else (kind,):
            with contextlib.suppress(Unavailable):
                await self._learn(one, "")
            found += [self.view(record) for record in self._shelves[one].records()]
        return found

    def view(self, record: NamedLayer) -> LayerView:
        """As the API shows it."""
        entries = 0
        with contextlib.suppress(NotFound):  # known by name, not fetched yet
            entries = self._layers.get(record.digest).entries
        return LayerView(
            kind=record.kind,
            name=record.name,
            digest=record.digest,
            size_bytes=record.size_bytes,
            entries=entries,
            created_at=record.created_at,
            source=record.source,
            description=record.description,
            used_by=len(self._layers.pins.by(record.digest)),
        )

    async def publish(
        self, job: Job[LayerView], kind: LayerKind, name: str, description: str, upload: Path
    ) -> LayerView:
        """Publish a version from a tar, a file under the store's `tmp`, taking it over.

        Without a version in the name it becomes the next `v<N>`.

        Raises:
            InvalidRequest: the name is wrong, or it is no tar.
            Conflict: the version exists with another content.
            StorageFull: no room.
        """
        path, version = split_version(name)
        known = [] if version else [view.name for view in await self.list(kind)]
        full = f"{path}:{version or next_version(path, known)}"

        async def kept(layer: LayerRecord) -> NamedLayer:
            return await self._keep(kind, full, description, layer)

        record = await self._importer.publish(job, upload, f"{kind} {full}", kept)
        if self._sharing is not None:
            await self._sharing.publish_named(record, job.report)
        return self.view(record)

    async def _keep(
        self, kind: LayerKind, name: str, description: str, layer: LayerRecord
    ) -> NamedLayer:
        with contextlib.suppress(NotFound):
            known = await self.find(kind, name)
            if known.digest != layer.digest:
                raise Conflict(
                    f"{kind} {name} exists with another content; versions do not change: "
                    "publish under a new one",
                    kind=kind,
                    name=name,
                )
            return known
        record = NamedLayer(
            kind=kind,
            name=name,
            digest=layer.digest,
            size_bytes=layer.content_bytes,
            created_at=self._clock.now(),
            source=layer.source,
            description=description,
        )
        await in_thread("disk", self._shelves[kind].put, record)
        return record

    async def remove(self, kind: LayerKind, name: str) -> None:
        """Forget a version, here and in the store.

        Raises:
            InvalidRequest: the name bears no version.
            NotFound: there is none.
            Conflict: a sandbox stands on it.
        """
        if not split_version(name)[1]:
            raise InvalidRequest(f"say which version of {kind} {name!r} is to go: NAME:VERSION")
        record = await self.find(kind, name)
        if users := sorted(self._layers.pins.by(record.digest)):
            raise Conflict(f"{kind} {name} is used by {', '.join(users[:5])}", users=len(users))
        if self._sharing is not None:
            await self._sharing.store.delete_document(kind, record.name)
        await in_thread("disk", self._shelves[kind].remove, record.name)


def next_version(path: str, known: list[str]) -> str:
    """The version after the highest `v<N>` of a path."""
    prefix = f"{path}:v"
    numbers = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
    return f"v{max((int(n) for n in numbers if n.isascii() and n.isdigit()), default=0) + 1}"
