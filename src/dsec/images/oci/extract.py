"""A layer's tar into a directory, in a process of its own: `python -m dsec.images.oci.extract`.

The tar is not trusted. The process has mounts of its own, is chrooted into the staging directory
before it reads the first entry, has a bound on its memory, and says on standard output, as lines
of JSON, how far it is and what came of it. Killed at any moment it leaves nothing but files below
the staging directory.

    <stage>/new       becomes the layer
    <stage>/lower     the layers below it, merged, read-only
    <stage>/l/<n>     each of them, topmost first
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import resource
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec
from msgspec import Struct
from typing_extensions import override

from dsec.base.errors import DsecError, InvalidRequest
from dsec.images.disk import full_disk_named
from dsec.images.oci.compression import SNIFF_BYTES, decompressed, sniff
from dsec.images.oci.tree import Limits, TreeWriter
from dsec.linux import mounts
from dsec.linux.process import die_with_parent

_MEMORY_BYTES = 2 << 30
_PROGRESS_BYTES = 8 << 20
_CHUNK = 1 << 18


class Progress(Struct, tag="progress"):
    """Bytes of the blob read so far."""

    done: int


class Extracted(Struct, tag="extracted", kw_only=True):
    """It worked."""

    diff_id: str
    self_contained: bool
    entries: int
    size_bytes: int
    dropped_xattrs: int = 0


class Refused(Struct, tag="refused"):
    """It did not; an error of the tree in `dsec.base.errors`."""

    code: str
    message: str


Said = Progress | Extracted | Refused


def main(argv: list[str]) -> int:
    """Do what the command line says; 0 also when the tar is refused, which is an answer."""
    arguments = _arguments(argv)
    if arguments.parent:
        die_with_parent(arguments.parent)
    said: Said
    try:
        said = extract(arguments)
    except DsecError as error:
        said = Refused(error.code, error.message)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        said = Refused("invalid_request", f"the tar cannot be read: {error}")
    except MemoryError:
        said = Refused("payload_too_large", "the tar asks for too much memory")
    say(said)
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dsec.images.oci.extract")
    parser.add_argument("--stage", type=Path, required=True)
    parser.add_argument("--blob", type=Path, required=True)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--lower", type=Path, action="append", default=[])
    parser.add_argument("--max-entries", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--need-end", action="store_true")
    parser.add_argument("--parent", type=int, default=0, help="die with this process")
    return parser.parse_args(argv)


def say(what: Said) -> None:
    """Write one line to the parent."""
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


def extract(arguments: argparse.Namespace) -> Extracted:
    """Extract as told; on return `<stage>/new` is the layer.

    Raises:
        InvalidRequest: the tar is damaged or hostile.
        PayloadTooLarge: it exceeds the limits.
        StorageFull: no room.
    """
    stage = cast("Path", arguments.stage)
    limits = Limits(arguments.max_entries, arguments.max_bytes)
    with cast("Path", arguments.blob).open("rb", buffering=0) as file:
        file.seek(arguments.offset)
        blob = BlobReader(file, arguments.size)
        with decompressed(cast("IO[bytes]", blob), sniff(blob.peek())) as plain:
            lower = _prepare_lower(stage, arguments.lower)
            _enclose(stage)
            with full_disk_named(stage):
                return _extract(plain, lower, limits, need_end=arguments.need_end)


def _prepare_lower(stage: Path, images: list[Path]) -> str | None:
    """Mount the layers below for this process alone: the mounts die with it."""
    if not images:
        return None
    mounts.unshare_mounts()
    os.chdir(stage)
    for number, image in enumerate(images):
        Path(f"l/{number}").mkdir(parents=True)
        mounts.mount_erofs(image, Path(f"l/{number}"))
    if len(images) == 1:
        return "/l/0"
    Path("lower").mkdir()
    mounts.mount_overlay_view([f"l/{number}" for number in range(len(images))], Path("lower"))
    return "/lower"


def _enclose(stage: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0)
    (stage / "new").mkdir(mode=0o755)
    os.chroot(stage)
    os.chdir("/")


def _extract(plain: IO[bytes], lower: str | None, limits: Limits, *, need_end: bool) -> Extracted:
    hashed = HashingReader(plain)
    writer = TreeWriter("/new", lower, limits)
    with _refusals_named():
        for member, content in entries(hashed, need_end=need_end):
            writer.add(member, content)
        hashed.drain()
        writer.finish()
    return Extracted(
        diff_id=f"sha256:{hashed.digest.hexdigest()}",
        self_contained=writer.self_contained,
        entries=writer.entries,
        size_bytes=writer.size_bytes,
        dropped_xattrs=writer.dropped_xattrs,
    )


_ARCHIVE_ERRNOS = {"ENAMETOOLONG", "EINVAL", "ELOOP", "EMLINK", "EEXIST", "ENOTDIR", "EILSEQ"}


@contextlib.contextmanager
def _refusals_named() -> Iterator[None]:
    """What the file system refuses because of a name or a value is the archive's fault."""
    try:
        yield
    except OSError as error:
        if errno.errorcode.get(error.errno or 0) in _ARCHIVE_ERRNOS:
            raise InvalidRequest(f"the archive has an entry that cannot be: {error}") from error
        raise


class _StrictTarInfo(tarfile.TarInfo):
    """tarfile takes a damaged header in the middle for the end of the archive; this does not."""

    @classmethod
    @override
    def fromtarfile(cls, archive: tarfile.TarFile) -> _StrictTarInfo:
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise InvalidRequest(f"the tar is cut short or damaged: {error}") from error


class _EndlessTarInfo(_StrictTarInfo):
    """Also refuses an archive without its end mark: nothing else tells that it is whole."""

    @classmethod
    @override
    def fromtarfile(cls, archive: tarfile.TarFile) -> _EndlessTarInfo:
        try:
            return cast("_EndlessTarInfo", super().fromtarfile(archive))
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            raise InvalidRequest("the tar is cut short: it has no end mark") from error


def entries(
    stream: HashingReader, *, need_end: bool
) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """The entries of a tar, each with the content of a regular file.

    Args:
        stream: the tar without compression.
        need_end: refuse a tar without its end mark.

    Raises:
        InvalidRequest: the tar is cut short or damaged.
        tarfile.TarError: likewise.
    """
    kind = _EndlessTarInfo if need_end else _StrictTarInfo
    with tarfile.TarFile(
        fileobj=cast("IO[bytes]", stream),
        mode="r",
        tarinfo=kind,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        for member in archive:
            yield member, archive.extractfile(member) if member.isreg() else None
            archive.members = []  # type: ignore[attr-defined]


class BlobReader:
    """A run of a file, telling the parent how far it is."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = size
        self._done = 0
        self._told = 0

    def peek(self) -> bytes:
        """The first bytes, without moving on."""
        head = os.pread(self._file.fileno(), SNIFF_BYTES, self._file.tell())
        return head[: self._left]

    def read(self, size: int = -1) -> bytes:
        """Like any file's."""
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        self._left -= len(data)
        self._done += len(data)
        if self._done - self._told >= _PROGRESS_BYTES:
            self._told = self._done
            say(Progress(self._done))
        return data


class HashingReader:
    """Reads a stream forward, hashing it.

    tarfile's own reader of streams would copy its whole buffer for every header.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._chunk = b""
        self._at = 0
        self._before = 0
        """Bytes of the stream before the chunk."""
        self.digest = hashlib.sha256()

    def _load(self) -> bool:
        self._before += len(self._chunk)
        self._chunk, self._at = self._stream.read(_CHUNK), 0
        self.digest.update(self._chunk)
        return bool(self._chunk)

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, fewer only at the end."""
        parts: list[bytes] = []
        while size > 0 and (self._at < len(self._chunk) or self._load()):
            part = self._chunk[self._at : self._at + size]
            self._at += len(part)
            size -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def tell(self) -> int:
        """Bytes read so far."""
        return self._before + self._at

    def seek(self, offset: int) -> int:
        """Skip forward to an offset; at the end of the stream it stops short.

        Raises:
            ValueError: it lies behind.
        """
        if offset < self.tell():
            raise ValueError(f"the stream cannot go back to {offset} from {self.tell()}")
        while offset > self.tell() and self.read(min(offset - self.tell(), _CHUNK)):
            pass
        return self.tell()

    def drain(self) -> None:
        """Read on to the end: padding after the end mark is part of the digest."""
        while self.read(_CHUNK):
            pass


def _load_for_chroot() -> None:
    """Load what is loaded lazily elsewhere: below the chroot there is no library."""
    import encodings.idna
    import encodings.latin_1
    import encodings.utf_8  # noqa: F401

    "\udc80".encode("utf-8", "surrogateescape")
    json.dumps(stat.S_IFMT(0))


if __name__ == "__main__":
    _load_for_chroot()
    sys.exit(main(sys.argv[1:]))
