"""Trees as tar streams. Packing trusts the local disk; unpacking trusts nothing it is given.

Unpacking does not use `tarfile`'s extraction: even its "data" filter resolves paths by name, and
has been got around (CVE-2025-4517). Here every directory is opened relative to its parent and
without following links, so a name cannot lead out of the target, whatever was unpacked before.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from dsec.base.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from dsec.sdk.models import Progress

CHUNK_BYTES = 256 << 10
BLOCK = 512
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC if os.open in os.supports_dir_fd else 0
_DIR = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _FLAGS
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS
Pull = Callable[[], bytes]
OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class Unpacked:
    """What a download did: how many entries and bytes, and what was left out, with the reason."""

    entries: int = 0
    size_bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def check_source(root: Path) -> None:
    """See that there is a directory to pack.

    Raises:
        NotFound: there is none.
    """
    if not root.is_dir():
        raise NotFound(f"no local directory {root}", kind="local_path")


def pack(root: Path, progress: OnProgress | None = None) -> Iterator[bytes]:
    """A directory's contents as a tar stream, names relative to it."""
    done = 0
    for path, name in walk(root):
        info = _describe(path, name)
        if info is None:
            continue
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if info.isreg():
            yield from content(path, info.size)
            done += info.size
        if progress:
            progress(Progress(name, done))
    yield bytes(2 * BLOCK)


def walk(root: Path) -> Iterator[tuple[Path, str]]:
    """All below a directory with names relative to it; directories before what is in them."""
    pending = [(root, "")]
    while pending:
        directory, prefix = pending.pop()
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            name = f"{prefix}{entry.name}"
            yield directory / entry.name, name
            if entry.is_dir(follow_symlinks=False):
                pending.append((directory / entry.name, f"{name}/"))


def _describe(path: Path, name: str) -> tarfile.TarInfo | None:
    status = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(status.st_mode)
    info.mtime = int(status.st_mtime)
    if stat.S_ISREG(status.st_mode):
        info.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = os.readlink(path)  # noqa: PTH115 - the text of the link, not a Path
    else:
        return None  # sockets, pipes and devices mean nothing elsewhere
    return info


def content(path: Path, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, filled up to whole blocks.

    Raises:
        InvalidRequest: it has no longer so many.
    """
    left = size
    with path.open("rb") as file:
        while left and (data := file.read(min(left, CHUNK_BYTES))):
            left -= len(data)
            yield data
    if left:
        raise InvalidRequest(f"{path} became shorter while it was read")
    if size % BLOCK:
        yield bytes(BLOCK - size % BLOCK)


class StreamReader(io.RawIOBase):
    """A stream of chunks as the file object tarfile reads from."""

    def __init__(self, pull: Pull) -> None:
        super().__init__()
        self._pull = pull
        self._rest = b""

    @override
    def read(self, size: int = -1) -> bytes:
        parts = [self._rest]
        have = len(self._rest)
        while have < size and (data := self._pull()):
            parts.append(data)
            have += len(data)
        whole = b"".join(parts)
        self._rest = whole[size:]
        return whole[:size]


def unpack(pull: Pull, target: Path, progress: OnProgress | None = None) -> Unpacked:
    """Unpack a tar stream below a directory.

    Args:
        pull: the next bytes of the stream, b"" at the end.
        target: made if it is missing.
        progress: called after each entry.

    Raises:
        Unavailable: the stream is no tar, or broke off.
        Unsupported: this system cannot open files relative to a directory.
    """
    if os.open not in os.supports_dir_fd:
        raise Unsupported("this system cannot unpack what is not trusted; use get_tar")
    target.mkdir(parents=True, exist_ok=True)
    root = os.open(target, _DIR & ~_FLAGS)
    result = Unpacked()
    unpacker = _Unpacker(root, result)
    try:
        with tarfile.open(
            fileobj=StreamReader(pull),
            mode="r|",
            encoding="utf-8",
            errors="surrogateescape",
        ) as archive:
            for member in archive:
                unpacker.take(archive, member)
                vars(archive)["members"] = []  # else it keeps every header
                if progress:
                    progress(Progress(member.name, result.size_bytes))
            unpacker.finish()
        while pull():
            pass  # the end of the body: an error after the last entry must not go unnoticed
    except (tarfile.TarError, EOFError) as exc:
        raise Unavailable(f"the tar stream from the sandbox is broken: {exc}") from exc
    finally:
        os.close(root)
    return result


class _Unpacker:
    def __init__(self, root: int, result: Unpacked) -> None:
        self._root = root
        self._result = result
        self._late_modes: list[tuple[list[str], int]] = []

    def take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Unpack one entry, or note why not."""
        parts = _parts(member.name)
        if parts is None:
            self._skip(member, "its name leads out of the directory")
            return
        if not parts:
            return  # the directory itself
        try:
            reason = self._place(archive, member, parts)
        except OSError as exc:
            if exc.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
                raise
            reason = exc.strerror or str(exc)
        if reason:
            self._skip(member, reason)
        else:
            self._result.entries += 1

    def _skip(self, member: tarfile.TarInfo, reason: str) -> None:
        self._result.skipped.append((member.name, reason))

    def _place(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str]
    ) -> str | None:
        *above, name = parts
        with _Directory(self._root, above, make=True) as parent:
            if member.isdir():
                self._directory(parent, name)
                self._late_modes.append((parts, member.mode & 0o777))
            elif member.isreg():
                self._file(archive, member, parent, name)
            elif member.issym():
                return _symlink(member, parent, name, len(above))
            elif member.islnk():
                return self._hard_link(member, parent, name)
            else:
                return "a device, pipe or socket"
        return None

    def _directory(self, parent: int, name: str) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                _clear(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)

    def _file(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str
    ) -> None:
        _clear(parent, name)
        content = archive.extractfile(member)
        descriptor = os.open(name, _NEW, 0o600, dir_fd=parent)
        with os.fdopen(descriptor, "wb") as file:
            while content and (data := content.read(CHUNK_BYTES)):
                file.write(data)
                self._result.size_bytes += len(data)
            file.flush()
            os.fchmod(descriptor, member.mode & 0o777)
            with suppress(OSError, OverflowError, ValueError):
                os.utime(descriptor, (member.mtime, member.mtime))

    def _hard_link(self, member: tarfile.TarInfo, parent: int, name: str) -> str | None:
        source = _parts(member.linkname)
        if not source:
            return "a hard link that leads out of the directory"
        *above, source_name = source
        with _Directory(self._root, above, make=False) as source_parent:
            status = os.stat(source_name, dir_fd=source_parent, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                return "a hard link to something that is no file"
            _clear(parent, name)
            os.link(
                source_name,
                name,
                src_dir_fd=source_parent,
                dst_dir_fd=parent,
                follow_symlinks=False,
            )
        return None

    def finish(self) -> None:
        """Directories get their modes last, so that one without write permission can be filled."""
        for parts, mode in reversed(self._late_modes):
            with suppress(OSError), _Directory(self._root, parts, make=False) as directory:
                os.fchmod(directory, mode | 0o700)


class _Directory:
    """A directory below the root, opened part by part without following links."""

    def __init__(self, root: int, parts: list[str], *, make: bool) -> None:
        self._root = root
        self._parts = parts
        self._make = make
        self._descriptor = -1

    def __enter__(self) -> int:
        self._descriptor = os.dup(self._root)
        try:
            for part in self._parts:
                self._step(part)
        except BaseException:
            os.close(self._descriptor)
            raise
        return self._descriptor

    def _step(self, part: str) -> None:
        try:
            below = os.open(part, _DIR, dir_fd=self._descriptor)
        except FileNotFoundError:
            if not self._make:
                raise
            os.mkdir(part, 0o755, dir_fd=self._descriptor)
            below = os.open(part, _DIR, dir_fd=self._descriptor)
        os.close(self._descriptor)
        self._descriptor = below

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _parts(name: str) -> list[str] | None:
    parts = [part for part in name.split("/") if part not in {"", "."}]
    return None if ".." in parts or name.startswith("/") or "\0" in name else parts


def _clear(parent: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _symlink(member: tarfile.TarInfo, parent: int, name: str, depth: int) -> str | None:
    if member.linkname.startswith("/"):
        return "a symbolic link to an absolute path"
    # Ups only at the start: after a name, which may itself be a link, ".." means anything.
    targets = [part for part in member.linkname.split("/") if part not in {"", "."}]
    ups = next((i for i, part in enumerate(targets) if part != ".."), len(targets))
    if ups > depth or ".." in targets[ups:]:
        return "a symbolic link that leads out of the directory"
    _clear(parent, name)
    os.symlink(member.linkname, name, dir_fd=parent)
    return None
