"""What an incoming file is, told from its content; and random access to a tar's members."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import IO

from dsec.base.errors import InvalidRequest
from dsec.images.oci.compression import SNIFF_BYTES, Compression, decompressed, sniff


class ArchiveKind(Enum):
    """What can be imported."""

    OCI = "an OCI image layout"
    DOCKER = "a `docker save` archive"
    ROOTFS = "a root file system"


_OCI_NAMES = {"oci-layout", "index.json"}
_DOCKER_NAMES = {"manifest.json", "repositories"}
_HEX = set("0123456789abcdef")


def kind_of_names(names: Iterable[str]) -> ArchiveKind:
    """Tell an archive by its members' names, reading no more of them than needed.

    An image archive holds nothing but its documents and blobs; the first other name settles that
    it is a root file system.
    """
    seen: set[str] = set()
    for name in names:
        top = _top(name)
        if top and not _belongs_to_image(top):
            return ArchiveKind.ROOTFS
        seen.add(top)
    if seen >= _OCI_NAMES:
        return ArchiveKind.OCI
    return ArchiveKind.DOCKER if "manifest.json" in seen else ArchiveKind.ROOTFS


def _top(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return parts[0] if parts else ""


def _belongs_to_image(top: str) -> bool:
    """Blobs' directory, documents, or Docker's old `<id>/`, `<id>.json`, `<id>.tar`."""
    stem = top.removesuffix(".json").removesuffix(".tar")
    is_id = len(stem) == 64 and set(stem) <= _HEX
    return top in _OCI_NAMES or top in _DOCKER_NAMES or top == "blobs" or is_id


def compression_of(path: Path) -> Compression:
    """How a file is compressed.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return sniff(file.read(SNIFF_BYTES))


def detect(path: Path) -> ArchiveKind:
    """Tell what a file is, compressed or not.

    Raises:
        InvalidRequest: it is no tar archive; the message says what it begins with.
    """
    try:
        with path.open("rb") as file, decompressed(file, compression_of(path)) as plain:
            with tarfile.open(fileobj=plain, mode="r|", errors="surrogateescape") as archive:
                return kind_of_names(member.name for member in archive)
    except tarfile.TarError as error:
        raise InvalidRequest(
            f"neither an image archive nor a root file system: no tar, begins with {_begin(path)}"
        ) from error


def detect_directory(path: Path) -> ArchiveKind:
    """Tell an image layout or unpacked `docker save` from a root file system."""
    return kind_of_names(entry.name for entry in path.iterdir())


def _begin(path: Path) -> str:
    with path.open("rb") as file:
        return ascii(file.read(16))


def unpack_plain(path: Path, plain: Path) -> None:
    """Write a compressed file out without its compression.

    Raises:
        InvalidRequest: it is cut short or damaged.
        OSError: no room.
    """
    with path.open("rb") as file, decompressed(file, compression_of(path)) as stream:
        with plain.open("xb") as out:
            while chunk := stream.read(1 << 20):
                out.write(chunk)


class TarMembers:
    """The members of an uncompressed tar by name: where in the file each one's bytes lie."""

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            InvalidRequest: it is no tar, or cut short.
        """
        self.path = path
        self._members: dict[str, tarfile.TarInfo] = {}
        size = path.stat().st_size
        try:
            with tarfile.open(path, "r:", errors="surrogateescape") as archive:
                for member in archive:
                    self._members[_clean(member.name)] = member
        except tarfile.TarError as error:
            raise InvalidRequest(f"the archive cannot be read: {error}") from error
        ends = [m.offset_data + m.size for m in self._members.values() if m.isreg()]
        if ends and max(ends) > size:
            raise InvalidRequest(f"the archive is cut short: {size} of {max(ends)} bytes")

    def find(self, name: str) -> tuple[int, int]:
        """Offset and size of a member's bytes, following links within the archive.

        Raises:
            InvalidRequest: no such member.
        """
        at = _clean(name)
        for _ in range(8):
            member = self._members.get(at)
            if member is None:
                break
            if member.isreg():
                return member.offset_data, member.size
            if not (member.issym() or member.islnk()):
                break
            base = PurePosixPath(at).parent if member.issym() else PurePosixPath()
            at = _clean(str(base / member.linkname))
        raise InvalidRequest(f"the archive has no file {name[:200]!r}")

    def __contains__(self, name: str) -> bool:
        return _clean(name) in self._members


def _clean(name: str) -> str:
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    """Read a run of a file.

    Raises:
        InvalidRequest: the file ends before it.
    """
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise InvalidRequest(f"the archive is cut short: {len(data)} of {size} bytes")
    return data
