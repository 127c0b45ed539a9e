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
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec

from dsec.base.clock import Clock
from dsec.base.errors import InvalidRequest, NotFound
from dsec.images import debian, disk
from dsec.images.catalog import Catalog
from dsec.images.erofs import mkfs
from dsec.images.jobs import Job
from dsec.images.layers import LayerStore
from dsec.images.locks import KeyedLock
from dsec.images.names import ImageName
from dsec.images.oci import archive, convert
from dsec.images.oci.archive import ArchiveKind
from dsec.images.oci.documents import host_architecture
from dsec.images.oci.extract import Extracted
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
from dsec.images.oci.tree import Limits
from dsec.images.records import ImageConfig, ImageRecord, LayerRecord, digest_of, view
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import ImageView

DEFAULT_LIMITS = Limits(entries=4_000_000, size_bytes=128 << 30)


_OWNER = "import-"


def is_import(owner: str) -> bool:
    """Whether a pin belongs to an import under way."""
    return owner.startswith(_OWNER)


@dataclass(frozen=True, slots=True)
class Import:
    """One import: who watches, its directory under `tmp`, and whose pins its layers have."""

    job: Job
    directory: Path
    owner: str

    def fresh(self, what: str) -> Path:
        """A path below the directory that is not used yet."""
        return self.directory / f"{what}-{uuid.uuid4().hex[:8]}"


class Importer:
    """Makes layers and records; see `ImageService` for the API over it."""

    def __init__(
        self, root: Path, layers: LayerStore, catalog: Catalog, clock: Clock, limits: Limits
    ) -> None:
        self._tmp = root.absolute() / "tmp"
        self._layers = layers
        self._catalog = catalog
        self._clock = clock
        self._limits = limits
        self._making = KeyedLock()
        self._architecture = host_architecture(os.uname().machine)
        self._mkfs_version = ""

    @contextlib.asynccontextmanager
    async def begin(self, job: Job) -> AsyncIterator[Import]:
        """Give an import its directory and pins, and take both away at the end."""
        directory = self._tmp / f"{_OWNER}{uuid.uuid4().hex}"
        try:
            await in_thread("disk", lambda: directory.mkdir(mode=0o700))
            with disk.full_disk_named(self._tmp):
                yield Import(job, directory, directory.name)
        finally:
            self._layers.unpin(directory.name)
            with anyio.CancelScope(shield=True):
                await in_thread("disk", disk.remove_tree, directory)

    # -- ways in ------------------------------------------------------------------------------

    async def import_path(self, job: Job, path: Path, name: ImageName, source: str) -> ImageView:
        """Import a file or directory of this host."""
        if not await in_thread("disk", path.exists):
            raise NotFound(f"there is no {path}", kind="path", path=str(path))
        async with self.begin(job) as work:
            if await in_thread("disk", path.is_dir):
                return await self._import_directory(work, path, name, source)
            return await self._import_file(work, path, name, source)

    async def import_upload(
        self, job: Job, upload: Path, name: ImageName, source: str
    ) -> ImageView:
        """Import a file of the store's own, taking it over from the caller who received it."""
        async with self.begin(job) as work:
            taken = work.fresh("archive")
            await in_thread("disk", upload.rename, taken)
            return await self._import_file(work, taken, name, source)

    async def pull(
        self, job: Job, reference: str, name: ImageName, *, tls_verify: bool
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
        self, job: Job, planned: debian.Plan, names: Sequence[ImageName]
    ) -> ImageView:
        """Build a Debian image and record it under each of the names; the first is shown."""
        async with self.begin(job) as work:
            root = work.fresh("root")
            await debian.build(planned, root, job.report)
            await in_thread("disk", debian.tidy, root)
            source = f"debian {planned.suite} with {' '.join(planned.packages)}"
            layer = await self._layer_of_tree(work, root, source)
            views = [await self._record(n, [layer], debian.CONFIG, source) for n in names]
            return views[0]

    # -- what a path is -----------------------------------------------------------------------

    async def _import_directory(
        self, work: Import, path: Path, name: ImageName, source: str
    ) -> ImageView:
        kind = await in_thread("disk", archive.detect_directory, path)
        if kind is not ArchiveKind.ROOTFS:
            return await self._import_image(work, kind, DirectoryFiles(path), name, source)
        layer = await self._layer_of_tree(work, path, source)
        return await self._record(name, [layer], ImageConfig(), source)

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
        return await self._record(name, [key], ImageConfig(), source)

    async def _import_image(
        self, work: Import, kind: ArchiveKind, files: Files, name: ImageName, source: str
    ) -> ImageView:
        image = await in_thread("disk", read_image, kind, files, self._architecture, name)
        keys: list[str] = []
        for number, layer in enumerate(image.layers, 1):
            place = f"{number} of {len(image.layers)}"
            keys.append(await self._ensure_layer(work, layer, keys, source, place))
        return await self._record(name, keys, image.config, source, image.digest)

    # -- layers -------------------------------------------------------------------------------

    async def _ensure_layer(
        self, work: Import, layer: SourceLayer, below: Sequence[str], source: str, place: str
    ) -> str:
        """The layer's digest in the store, converted unless it is there."""
        over = key_over(layer.diff_id, below)
        self._layers.pin([layer.diff_id, over], work.owner)
        async with self._making.holding(layer.diff_id):
            for key in (layer.diff_id, over):
                if await in_thread("disk", self._layers.has, key):
                    return key
            return await self._make_layer(work, layer, below, source, place)

    async def _make_layer(
        self, work: Import, layer: SourceLayer, below: Sequence[str], source: str, place: str
    ) -> str:
        extracted, tree = await self._extract(work, layer, below, place)
        if layer.diff_id and extracted.diff_id != layer.diff_id:
            raise InvalidRequest(
                f"layer {place} is damaged: without compression it hashes to "
                f"{extracted.diff_id}, not {layer.diff_id}"
            )
        alone = extracted.self_contained
        key = extracted.diff_id if alone else key_over(extracted.diff_id, below)
        record = LayerRecord(
            digest=key,
            source=source,
            size_bytes=0,
            created_at=0.0,
            mkfs="",
            diff_id=extracted.diff_id,
            below=[] if alone else list(below),
        )
        image = work.fresh("erofs")
        work.job.report(f"writing layer {place}")
        # The tree stays until the import ends: ext4 avoids inodes deleted in the last minutes, and
        # looking for others would make unpacking the next layer several times slower.
        await mkfs.build(tree, image)
        await self._put(work, record, image)
        return key

    async def _extract(
        self, work: Import, layer: SourceLayer, below: Sequence[str], place: str
    ) -> tuple[Extracted, Path]:
        if layer.blob.digest:
            work.job.report(f"checking layer {place}")
            await in_thread("build", verify, layer.blob)
        stage = work.fresh("stage")
        await in_thread("disk", lambda: stage.mkdir(mode=0o700))
        lowers = [self._layers.image_path(key) for key in dict.fromkeys(reversed(below))]
        step, total = f"unpacking layer {place}", layer.blob.size
        work.job.report(step, 0, total)
        extracted = await convert.extract(
            stage,
            layer.blob,
            lowers,
            self._limits,
            lambda done: work.job.report(step, done, total),
            need_end=not (layer.blob.digest or layer.diff_id),
        )
        return extracted, stage / "new"

    async def _layer_of_tree(self, work: Import, tree: Path, source: str) -> str:
        """A layer of a directory. It has no tar to be known by, so its digest is the image's."""
        image = work.fresh("erofs")
        work.job.report("writing the layer")
        await mkfs.build(tree, image)
        digest = await in_thread("build", file_digest, image)
        record = LayerRecord(digest=digest, source=source, size_bytes=0, created_at=0.0, mkfs="")
        await self._put(work, record, image)
        return digest

    async def _put(self, work: Import, record: LayerRecord, image: Path) -> None:
        self._layers.pin([record.digest], work.owner)
        status = await in_thread("disk", image.stat)
        complete = msgspec.structs.replace(
            record,
            size_bytes=status.st_size,
            created_at=self._clock.now(),
            mkfs=await self._version(),
        )
        await in_thread("disk", self._layers.put, complete, image)

    async def _version(self) -> str:
        if not self._mkfs_version:
            self._mkfs_version = await in_thread("build", mkfs.detect_version)
        return self._mkfs_version

    async def _record(
        self,
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
            size_bytes=await in_thread("disk", self._size_of, keys),
            created_at=self._clock.now(),
            source=source,
            config=config,
        )
        await in_thread("disk", self._catalog.put, record)
        return view(record)

    def _size_of(self, keys: Iterable[str]) -> int:
        return sum(self._layers.get(key).size_bytes for key in set(keys))


def key_over(diff_id: str, below: Sequence[str]) -> str:
    """The digest of a layer that fits over certain layers alone: it covers them too."""
    body = msgspec.json.encode({"diff_id": diff_id, "below": list(below)}, order="deterministic")
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def file_digest(path: Path) -> str:
    """sha256 of a file. Blocking."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
