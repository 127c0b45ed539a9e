"""The steps from bytes to an image in the store, shared by every way in.

Each import has a directory of its own under `tmp` and pins the layers it puts, so that nothing
removes them before the image's record names them. Whatever happens, the directory goes; after a
crash the next start sweeps it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec

from dsec.base.clock import Clock
from dsec.base.errors import InvalidRequest, NotFound
from dsec.images import debian, disk
from dsec.images.compose import MergeLimits, key_of_merged, key_over, plan_merges
from dsec.images.converting import Converted, convert_directory, convert_merge, convert_tar
from dsec.images.data import DataStore
from dsec.images.jobs import Job
from dsec.images.layers import LayerStore
from dsec.images.locks import KeyedLock
from dsec.images.names import ImageName
from dsec.images.oci import archive
from dsec.images.oci.archive import ArchiveKind
from dsec.images.oci.documents import host_architecture
from dsec.images.oci.layer import MAX_IMPLIED, Limits
from dsec.images.oci.registry import Registry
from dsec.images.oci.source import (
    Blob,
    DirectoryFiles,
    Files,
    SourceLayer,
    TarFiles,
    read_image,
    verify,
)
from dsec.images.records import (
    DataRecord,
    ImageConfig,
    ImageRecord,
    LayerRecord,
    digest_of,
    view,
)
from dsec.images.shelf import Shelf
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import ImageView

T = TypeVar("T")
DEFAULT_LIMITS = Limits(entries=4_000_000, size_bytes=128 << 30)


_OWNER = "import-"


def is_import(owner: str) -> bool:
    """Whether a pin belongs to an import under way."""
    return owner.startswith(_OWNER)


@dataclass(frozen=True, slots=True)
class Import:
    """One import: who watches, its directory under `tmp`, and whose pins its layers have."""

    job: Job[Any]
    directory: Path
    owner: str

    def fresh(self, what: str) -> Path:
        """A path below the directory that is not used yet."""
        return self.directory / f"{what}-{uuid.uuid4().hex[:8]}"


class Importer:
    """Makes layers and records; see `ImageService` for the API over it."""

    def __init__(
        self,
        root: Path,
        layers: LayerStore,
        data: DataStore,
        catalog: Shelf[ImageRecord],
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._tmp = root.absolute() / "tmp"
        self._layers = layers
        self._data = data
        self._merging = MergeLimits()
        self._catalog = catalog
        self._clock = clock
        self._limits = limits
        self._making = KeyedLock()
        self._architecture = host_architecture(os.uname().machine)

    @contextlib.asynccontextmanager
    async def begin(self, job: Job[Any]) -> AsyncIterator[Import]:
        """Give an import its directory and pins, and take both away at the end."""
        directory = self._tmp / f"{_OWNER}{uuid.uuid4().hex}"
        try:
            await in_thread("disk", lambda: directory.mkdir(mode=0o700))
            with disk.full_disk_named(self._tmp):
                yield Import(job, directory, directory.name)
        finally:
            self._layers.pins.unpin(directory.name)
            self._data.pins.unpin(directory.name)
            with anyio.CancelScope(shield=True):
                await in_thread("disk", disk.remove_tree, directory)

    # -- ways in ------------------------------------------------------------------------------

    async def import_path(
        self, job: Job[Any], path: Path, name: ImageName, source: str
    ) -> ImageView:
        """Import a file or directory of this host."""
        if not await in_thread("disk", path.exists):
            raise NotFound(f"there is no {path}", kind="path", path=str(path))
        async with self.begin(job) as work:
            if await in_thread("disk", path.is_dir):
                return await self._import_directory(work, path, name, source)
            return await self._import_file(work, path, name, source)

    async def import_upload(
        self, job: Job[Any], upload: Path, name: ImageName, source: str
    ) -> ImageView:
        """Import a file of the store's own, taking it over from the caller who received it."""
        async with self.begin(job) as work:
            taken = work.fresh("archive")
            await in_thread("disk", upload.rename, taken)
            return await self._import_file(work, taken, name, source)

    async def pull(
        self, job: Job[Any], reference: str, name: ImageName, *, tls_verify: bool
    ) -> ImageView:
        """Import from a registry."""
        registry = Registry(reference, self._architecture, tls_verify=tls_verify)
        async with self.begin(job) as work:
            job.report("reading the manifest")
            total = await registry.total_bytes()
            layout = await registry.copy(
                work.directory, lambda done: job.report("pulling", min(done, total), total)
            )
            files = DirectoryFiles(layout)
            return await self._import_image(work, ArchiveKind.OCI, files, name, reference)

    async def build_debian(
        self, job: Job[Any], planned: debian.Plan, names: Sequence[ImageName]
    ) -> ImageView:
        """Build a Debian image and record it under each of the names; the first is shown."""
        async with self.begin(job) as work:
            root = work.fresh("root")
            await debian.build(planned, root, job.report)
            await in_thread("disk", debian.tidy, root)
            source = f"debian {planned.suite} with {' '.join(planned.packages)}"
            layer = await self._layer_of_tree(work, root, source)
            views = [await self._record(work, n, [layer], debian.CONFIG, source) for n in names]
            return views[0]

    async def publish(
        self, job: Job[Any], upload: Path, source: str, kept: Callable[[LayerRecord], Awaitable[T]]
    ) -> T:
        """Make a layer of a tar, taking the file over, and hand its record to `kept`.

        Raises:
            InvalidRequest: it is no tar, or damaged, or leaves out too many directories.
        """
        async with self.begin(job) as work:
            taken = work.fresh("archive")
            await in_thread("disk", upload.rename, taken)
            kind = await in_thread("disk", archive.detect, taken)
            if kind is not ArchiveKind.ROOTFS:
                raise InvalidRequest(f"this is {kind.value}; a layer is made from a tar of files")
            size = (await in_thread("disk", taken.stat)).st_size
            layer = SourceLayer(Blob(taken, 0, size), "")
            key = await self._make_layer(work, layer, [], source, "1 of 1")
            record = await in_thread("disk", self._layers.get, key)
            _check_implied(record)
            return await kept(record)

    # -- what a path is -----------------------------------------------------------------------

    async def _import_directory(
        self, work: Import, path: Path, name: ImageName, source: str
    ) -> ImageView:
        kind = await in_thread("disk", archive.detect_directory, path)
        if kind is not ArchiveKind.ROOTFS:
            return await self._import_image(work, kind, DirectoryFiles(path), name, source)
        layer = await self._layer_of_tree(work, path, source)
        return await self._record(work, name, [layer], ImageConfig(), source)

    async def _import_file(
        self, work: Import, path: Path, name: ImageName, source: str
    ) -> ImageView:
        kind = await in_thread("disk", archive.detect, path)
        work.job.report(f"found {kind.value}")
        if kind is ArchiveKind.ROOTFS:
            return await self._import_rootfs(work, path, name, source)
        if await in_thread("disk", archive.compression_of, path) != "none":
            plain = work.fresh("plain")
            work.job.report("decompressing")
            await in_thread("build", archive.unpack_plain, path, plain)
            path = plain
        files = await in_thread("disk", TarFiles, path)
        return await self._import_image(work, kind, files, name, source)

    async def _import_rootfs(
        self, work: Import, path: Path, name: ImageName, source: str
    ) -> ImageView:
        size = (await in_thread("disk", path.stat)).st_size
        layer = SourceLayer(Blob(path, 0, size), "")
        key = await self._make_layer(work, layer, [], source, "1 of 1")
        return await self._record(work, name, [key], ImageConfig(), source)

    async def _import_image(
        self, work: Import, kind: ArchiveKind, files: Files, name: ImageName, source: str
    ) -> ImageView:
        image = await in_thread("disk", read_image, kind, files, self._architecture, name)
        keys: list[str] = []
        for number, layer in enumerate(image.layers, 1):
            place = f"{number} of {len(image.layers)}"
            keys.append(await self._ensure_layer(work, layer, keys, source, place))
        return await self._record(work, name, keys, image.config, source, image.digest)

    # -- layers -------------------------------------------------------------------------------

    async def _ensure_layer(
        self, work: Import, layer: SourceLayer, below: Sequence[str], source: str, place: str
    ) -> str:
        """The layer's digest in the store, converted unless it is there."""
        over = key_over(layer.diff_id, below)
        self._layers.pins.pin([layer.diff_id, over], work.owner)
        async with self._making.holding(layer.diff_id):
            for key in (layer.diff_id, over):
                if await in_thread("disk", self._is_here, key):
                    return key
            return await self._make_layer(work, layer, below, source, place)

    def _is_here(self, key: str) -> bool:
        """Whether a layer, and all data it points into, is known here; pinned from here on."""
        return self._layers.has(key) and self._data.has_all(self._layers.get(key).devices)

    async def _make_layer(
        self, work: Import, layer: SourceLayer, below: Sequence[str], source: str, place: str
    ) -> str:
        if layer.blob.digest:
            work.job.report(f"checking layer {place}")
            await in_thread("build", verify, layer.blob)
        step, total = f"converting layer {place}", layer.blob.size
        work.job.report(step, 0, total)
        out = await self._out(work)
        converted = await convert_tar(
            out,
            layer.blob,
            [self._layers.meta(key) for key in below],
            self._limits,
            lambda done: work.job.report(step, done, total),
            need_end=not (layer.blob.digest or layer.diff_id),
        )
        if layer.diff_id and converted.diff_id != layer.diff_id:
            raise InvalidRequest(
                f"layer {place} is damaged: without compression it hashes to "
                f"{converted.diff_id}, not {layer.diff_id}"
            )
        alone = converted.self_contained
        key = converted.diff_id if alone else key_over(converted.diff_id, below)
        record = self._layer_record(key, source, converted)
        await self._put(
            work,
            msgspec.structs.replace(record, below=[] if alone else list(below)),
            out,
            converted,
        )
        return key

    async def _layer_of_tree(self, work: Import, tree: Path, source: str) -> str:
        """A layer of a directory."""
        work.job.report("converting the directory")
        out = await self._out(work)
        converted = await convert_directory(
            out,
            tree,
            self._limits,
            lambda done: work.job.report("converting the directory", done),
        )
        record = self._layer_record(converted.diff_id, source, converted)
        await self._put(work, record, out, converted)
        return record.digest

    async def _merged(self, work: Import, keys: Sequence[str], source: str) -> list[str]:
        """What is mounted for these layers: runs of them in one, as far as that is wise."""
        records = [await in_thread("disk", self._layers.get, key) for key in keys]
        others = [image.layers for image in self._catalog.records()]
        mounts = []
        for run in plan_merges(records, self._merging, others):
            bottom = run[0] == keys[0]
            mounts.append(await self._ensure_merged(work, run, source, bottom=bottom))
        return mounts

    async def merge(self, work: Import, run: Sequence[str], source: str) -> list[str]:
        """What is mounted for layers that lie over others: runs of them in one, if that is wise.

        Raises:
            NotFound: (kind layer) one is not here.
            StorageFull: no room.
        """
        records = [await in_thread("disk", self._layers.get, key) for key in run]
        runs = plan_merges(records, self._merging)
        return [await self._ensure_merged(work, one, source, bottom=False) for one in runs]

    async def _ensure_merged(
        self, work: Import, run: Sequence[str], source: str, *, bottom: bool
    ) -> str:
        if len(run) == 1:
            return run[0]
        key = key_of_merged(run, bottom=bottom)
        self._layers.pins.pin([key], work.owner)
        async with self._making.holding(key):
            if await in_thread("disk", self._is_here, key):
                return key
            work.job.report(f"merging {len(run)} layers")
            out = await self._out(work)
            metas = [self._layers.meta(digest) for digest in run]
            converted = await convert_merge(out, metas, keep_whiteouts=not bottom)
            record = self._layer_record(key, source, converted)
            merged = msgspec.structs.replace(record, diff_id="", merged=list(run))
            await self._put(work, merged, out, converted)
            return key

    async def _out(self, work: Import) -> Path:
        out = work.fresh("converted")
        await in_thread("disk", lambda: out.mkdir(mode=0o700))
        return out

    def _layer_record(self, key: str, source: str, converted: Converted) -> LayerRecord:
        return LayerRecord(
            digest=key,
            source=source,
            created_at=self._clock.now(),
            meta=converted.meta,
            devices=[device.digest for device in converted.devices],
            entries=converted.entries,
            content_bytes=converted.content_bytes,
            diff_id=converted.diff_id,
            implied=converted.implied,
        )

    async def put(
        self, work: Import, source: str, converted: Converted, out: Path, *, sync: bool
    ) -> LayerRecord:
        """Take over a layer that was made in a directory of the import's; it stays pinned.

        Args:
            work: the import.
            source: where the layer came from, for people.
            converted: it.
            out: its directory.
            sync: whether it is to outlive a crash of the host.

        Raises:
            StorageFull: no room; nothing partial is left.
        """
        record = self._layer_record(converted.diff_id, source, converted)
        await self._put(work, record, out, converted, sync=sync)
        return record

    async def _put(
        self,
        work: Import,
        record: LayerRecord,
        out: Path,
        converted: Converted,
        *,
        sync: bool = True,
    ) -> None:
        """Data first: a layer in the store can always be mounted."""
        self._layers.pins.pin([record.digest], work.owner)
        self._data.pins.pin(record.devices, work.owner)
        for device in converted.devices:
            if device.digest == converted.own_data:
                data = DataRecord(digest=device.digest, size_bytes=device.size_bytes)
                put_raw = partial(self._data.put_raw, data, out / "data", sync=sync)
                await in_thread("disk", put_raw)
        put = partial(self._layers.put, record, out / "meta.erofs", sync=sync)
        await in_thread("disk", put)

    async def _record(
        self,
        work: Import,
        name: ImageName,
        keys: Sequence[str],
        config: ImageConfig,
        source: str,
        digest: str = "",
    ) -> ImageView:
        record = ImageRecord(
            name=name,
            digest=digest or digest_of(list(keys), config),
            layers=list(keys),
            mounts=await self._merged(work, keys, source),
            size_bytes=await in_thread("disk", self._size_of, keys),
            created_at=self._clock.now(),
            source=source,
            config=config,
        )
        await in_thread("disk", self._catalog.put, record)
        return view(record)

    def _size_of(self, keys: Iterable[str]) -> int:
        return sum(self._layers.get(key).content_bytes for key in set(keys))


def _check_implied(record: LayerRecord) -> None:
    if len(record.implied) > MAX_IMPLIED:
        raise InvalidRequest(
            f"the tar does not list more than {MAX_IMPLIED} of the directories its files are in; "
            "make it of whole directories, so that their owners and modes are known"
        )


def file_digest(path: Path) -> str:
    """sha256 of a file. Blocking."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
