"""An image to import: its configuration and where its layers' bytes are, digests checked.

Blocking; call from a worker thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsec.base.digests import check_digest, digest_of
from dsec.base.errors import InvalidRequest
from dsec.images.names import ImageName
from dsec.images.oci.archive import ArchiveKind, TarMembers, read_at
from dsec.images.oci.documents import (
    MAX_DOCUMENT_BYTES,
    ConfigFile,
    Descriptor,
    Index,
    Manifest,
    MediaTyped,
    SavedImage,
    check_platform,
    decode,
    pick_platform,
)
from dsec.images.records import ImageConfig

_MAX_NESTING = 4


@dataclass(frozen=True, slots=True)
class Blob:
    """A run of a file."""

    path: Path
    offset: int
    size: int
    digest: str = ""
    """What its bytes must hash to; "" if nothing promised one."""


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """A layer, as it comes."""

    blob: Blob
    diff_id: str
    """What its bytes must hash to without compression; "" if nothing promised one."""


@dataclass(frozen=True, slots=True)
class SourceImage:
    """An image, as it comes; layers bottom first."""

    digest: str
    config: ImageConfig
    layers: tuple[SourceLayer, ...]


class Files(Protocol):
    """Files by name: a directory's or a tar's."""

    def locate(self, name: str) -> Blob:
        """Where a file's bytes are.

        Raises:
            InvalidRequest: there is none.
        """
        ...


class DirectoryFiles:
    """The files of a directory. It is not trusted: a symbolic link is not followed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def locate(self, name: str) -> Blob:
        """See `Files`."""
        path = self._root / name
        if ".." in path.parts or path.is_symlink() or not path.is_file():
            raise InvalidRequest(f"the image has no file {name[:200]!r}")
        return Blob(path, 0, path.stat().st_size)


class TarFiles:
    """The members of an uncompressed tar."""

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            InvalidRequest: it is no tar, or cut short.
        """
        self._members = TarMembers(path)

    def locate(self, name: str) -> Blob:
        """See `Files`."""
        offset, size = self._members.find(name)
        return Blob(self._members.path, offset, size)


def read_image(
    kind: ArchiveKind, files: Files, architecture: str, wanted: ImageName
) -> SourceImage:
    """Read what an archive says of its image for this architecture.

    Args:
        kind: what the archive is; not a root file system.
        files: its files.
        architecture: OCI's word for the host's.
        wanted: chooses between several images of one archive, by tag.

    Raises:
        InvalidRequest: cut short, damaged, or a digest does not fit; the message says where.
        Unsupported: nothing in it is for linux on this architecture.
    """
    if kind is ArchiveKind.DOCKER:
        return _read_saved(files, architecture, wanted)
    return _read_layout(files, architecture, wanted)


def document(blob: Blob, what: str) -> bytes:
    """Read a small file whole and check its digest.

    Raises:
        InvalidRequest: too large, cut short, or not what its digest promised.
    """
    if blob.size > MAX_DOCUMENT_BYTES:
        raise InvalidRequest(f"{what} is {blob.size} bytes; {MAX_DOCUMENT_BYTES} are allowed")
    with blob.path.open("rb") as file:
        data = read_at(file, blob.offset, blob.size)
    found = digest_of(data)
    if blob.digest and found != blob.digest:
        raise InvalidRequest(f"{what} is damaged: it hashes to {found}, not {blob.digest}")
    return data


def verify(blob: Blob) -> None:
    """Check that a blob is what its digest promised.

    Raises:
        InvalidRequest: cut short, or it is something else.
    """
    digest, left = hashlib.sha256(), blob.size
    with blob.path.open("rb") as file:
        file.seek(blob.offset)
        while left and (chunk := file.read(min(left, 1 << 20))):
            digest.update(chunk)
            left -= len(chunk)
    found = f"sha256:{digest.hexdigest()}"
    if left:
        raise InvalidRequest(f"a layer is cut short: {left} of {blob.size} bytes are missing")
    if blob.digest and found != blob.digest:
        raise InvalidRequest(f"a layer is damaged: it hashes to {found}, not {blob.digest}")


def blob_of(files: Files, descriptor: Descriptor) -> Blob:
    """The blob a descriptor of a layout points to, its size checked.

    Raises:
        InvalidRequest: missing, or of another size.
    """
    digest = check_digest(descriptor.digest)
    found = files.locate(f"blobs/sha256/{digest.removeprefix('sha256:')}")
    if descriptor.size and descriptor.size != found.size:
        raise InvalidRequest(f"{digest} is cut short: {found.size} of {descriptor.size} bytes")
    return Blob(found.path, found.offset, found.size, digest)


def _read_layout(files: Files, architecture: str, wanted: ImageName) -> SourceImage:
    index = decode(document(files.locate("index.json"), "index.json"), Index, "index.json")
    found = pick_platform(_of_tag(index.manifests, wanted), architecture, "the image layout")
    for _ in range(_MAX_NESTING):
        data = document(blob_of(files, found), f"manifest {found.digest}")
        nested = decode(data, MediaTyped, f"manifest {found.digest}")
        if nested.manifests is None:
            return _read_manifest(files, found.digest, data, architecture)
        found = pick_platform(nested.manifests, architecture, f"index {found.digest}")
    raise InvalidRequest(f"more than {_MAX_NESTING} indexes within each other")


def _of_tag(manifests: list[Descriptor], wanted: ImageName) -> list[Descriptor]:
    """Those of the wanted name or tag, if any are; else all."""
    names = {wanted, wanted.rpartition(":")[2]}
    return [d for d in manifests if d.ref_name() in names] or manifests


def _read_manifest(files: Files, digest: str, data: bytes, architecture: str) -> SourceImage:
    manifest = decode(data, Manifest, f"manifest {digest}")
    config = _read_config(document(blob_of(files, manifest.config), "configuration"), architecture)
    blobs = [blob_of(files, layer) for layer in manifest.layers]
    return _image(digest, config, blobs)


def _read_config(data: bytes, architecture: str) -> ConfigFile:
    config = decode(data, ConfigFile, "the image's configuration")
    check_platform(config, architecture, "the image")
    return config


def _image(digest: str, config: ConfigFile, blobs: list[Blob]) -> SourceImage:
    diff_ids = [check_digest(diff_id) for diff_id in config.rootfs.diff_ids]
    if len(diff_ids) != len(blobs):
        raise InvalidRequest(f"{len(blobs)} layers, but {len(diff_ids)} diff_ids name them")
    if not blobs:
        raise InvalidRequest("the image has no layers")
    layers = tuple(SourceLayer(blob, diff) for blob, diff in zip(blobs, diff_ids, strict=True))
    return SourceImage(digest, config.config.plain() if config.config else ImageConfig(), layers)


def _read_saved(files: Files, architecture: str, wanted: ImageName) -> SourceImage:
    data = document(files.locate("manifest.json"), "manifest.json")
    saved = _choose(decode(data, list[SavedImage], "manifest.json"), wanted)
    config_blob = files.locate(saved.config)
    promised = _digest_in_name(saved.config)
    blob = Blob(config_blob.path, config_blob.offset, config_blob.size, promised)
    config_data = document(blob, "the image's configuration")
    config = _read_config(config_data, architecture)
    digest = digest_of(config_data)
    return _image(digest, config, [files.locate(layer) for layer in saved.layers])


def _choose(saved: list[SavedImage], wanted: ImageName) -> SavedImage:
    tagged = [image for image in saved if wanted in (image.repo_tags or [])] or saved
    if len(tagged) != 1:
        names = ", ".join(tag for image in saved for tag in image.repo_tags or []) or "none named"
        raise InvalidRequest(f"the archive holds {len(saved)} images ({names}); it must hold one")
    return tagged[0]


def _digest_in_name(name: str) -> str:
    stem = name.rpartition("/")[2].removesuffix(".json")
    try:
        return check_digest(f"sha256:{stem}")
    except InvalidRequest:
        return ""
