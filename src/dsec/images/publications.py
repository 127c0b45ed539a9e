"""Workspaces and toolkits: layers with a name and a version, put over an image at creation.

A version never changes. To publish the same content under the same version again is harmless.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
from msgspec.structs import replace

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, InvalidRequest, NotFound, Unavailable
from dsec.images.importer import Importer
from dsec.images.jobs import Job
from dsec.images.layers import LayerStore
from dsec.images.locks import KeyedLock
from dsec.images.names import image_name
from dsec.images.records import LayerRecord, NamedLayer
from dsec.images.sending import Report
from dsec.images.sharing import Sharing, another_content
from dsec.images.shelf import Shelf
from dsec.images.store_names import LISTING_S
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import LayerKind, LayerView

logger = logging.getLogger("dsec.images.publications")

_TRIES = 10
KINDS: tuple[LayerKind, LayerKind] = ("workspace", "toolkit")


def split_version(name: str) -> tuple[str, str]:
    """A layer's path and version, "" if none is given.

    Raises:
        InvalidRequest: it is no name.
    """
    try:
        full = image_name(name)
    except InvalidRequest:
        raise InvalidRequest(
            f"{name[:200]!r} is no name of a workspace or toolkit: NAME or NAME:VERSION, the name in "
            "lower case, such as lint, team/lint:v2 or task-17:2024.01"
        ) from None
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
        self._keeping = KeyedLock()

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
        found = shelf.find(name) if version else await self._newest(kind, path)
        if found is None and version and self._sharing is not None:
            with contextlib.suppress(NotFound):
                found = await self._sharing.names.named(kind, f"{path}:{version}")
        if found is None:
            raise shelf.missing(name)
        return found

    async def _newest(self, kind: LayerKind, path: str) -> NamedLayer | None:
        """Of all versions; if the store does not answer, of those that are known here."""
        known = self._shelves[kind].newest(path)
        stored: list[NamedLayer] = []
        try:
            with anyio.fail_after(LISTING_S if known else None):
                if self._sharing is not None:
                    stored = await self._sharing.names.versions(kind, path)
        except (Unavailable, TimeoutError) as error:
            if known is None:
                raise
            logger.warning("newer versions may be in the store", extra={"why": str(error)})
        return max([*stored, *([known] if known else [])], key=_published_at, default=None)

    async def list(self, kind: LayerKind | None) -> list[LayerView]:
        """All of one kind or both, by name; the store's included, as far as it answers."""
        found = []
        for one in KINDS if kind is None else (kind,):
            found += [self.view(record) for record in await self._records(one)]
        return found

    async def _records(self, kind: LayerKind) -> Sequence[NamedLayer]:
        """By name; what was published here goes before what the store says of the name."""
        stored = await self._sharing.names.all(kind) if self._sharing is not None else []
        records = {record.name: record for record in [*stored, *self._shelves[kind].records()]}
        return [records[name] for name in sorted(records)]

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
            Unavailable: the store does not answer; it was not published.
            StorageFull: no room.
        """
        path, version = split_version(name)

        async def kept(layer: LayerRecord) -> NamedLayer:
            record = NamedLayer(
                kind=kind,
                name=f"{path}:{version}" if version else path,
                digest=layer.digest,
                size_bytes=layer.content_bytes,
                created_at=self._clock.now(),
                source=layer.source,
                description=description,
            )
            keep = self._keep if version else self._keep_next
            return await keep(record, job.report)

        return self.view(await self._importer.publish(job, upload, f"{kind} {name}", kept))

    async def _keep_next(self, record: NamedLayer, report: Report) -> NamedLayer:
        """Keep it as the next version of its path; as a later one if another was faster."""
        for _ in range(_TRIES):
            known = [known.name for known in self._shelves[record.kind].records()]
            if self._sharing is not None:
                known += await self._sharing.names.names(record.kind)
            full = f"{record.name}:{next_version(record.name, known)}"
            with contextlib.suppress(Conflict):
                return await self._keep(replace(record, name=full), report)
        raise Conflict(f"versions of {record.kind} {record.name} come too fast; try again")

    async def _keep(self, record: NamedLayer, report: Report) -> NamedLayer:
        """Have a version, in the store first: there it is decided what it means."""
        shelf = self._shelves[record.kind]
        async with self._keeping.holding((record.kind, record.name)):
            known = shelf.find(record.name)
            if known is not None and known.digest != record.digest:
                raise another_content(known)
            kept = known or record
            if self._sharing is not None:
                kept = await self._sharing.publish_named(kept, report)
            if kept != known:
                await in_thread("disk", shelf.put, kept)
            return kept

    async def remove(self, kind: LayerKind, name: str) -> None:
        """Forget a version: here, then in the store if it still means the same there.

        Raises:
            InvalidRequest: the name bears no version.
            NotFound: there is none.
            Conflict: a sandbox stands on it.
            Unsupported, Unavailable: it is gone here, and the store keeps it.
        """
        if not split_version(name)[1]:
            raise InvalidRequest(f"say which version of {kind} {name!r} is to go: NAME:VERSION")
        record, shelf = await self.find(kind, name), self._shelves[kind]
        async with self._keeping.holding((kind, record.name)):
            self._check_unused(record)
            if shelf.find(record.name) is not None:
                await in_thread("disk", shelf.remove, record.name)
            if self._sharing is not None:
                await self._sharing.forget(kind, record.name, record.digest)

    def _check_unused(self, record: NamedLayer) -> None:
        """Refuse if sandboxes stand on a layer that has no other name. Raises Conflict."""
        others = [r for shelf in self._shelves.values() for r in shelf.records()]
        if any(r.digest == record.digest and r != record for r in others):
            return
        if users := sorted(self._layers.pins.by(record.digest)):
            raise Conflict(
                f"{record.kind} {record.name} is used by {', '.join(users[:5])}",
                users=len(users),
                advice="stop these sandboxes first, or leave the version and publish a newer one",
            )


def _published_at(record: NamedLayer) -> float:
    return record.created_at


def next_version(path: str, known: list[str]) -> str:
    """The version after the highest `v<N>` of a path."""
    prefix = f"{path}:v"
    numbers = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
    return f"v{max((int(n) for n in numbers if n.isascii() and n.isdigit()), default=0) + 1}"
