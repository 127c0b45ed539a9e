"""A store in a directory: of this node, or of a mounted file system that nodes share.

A file appears under its name whole (written aside, synced, renamed), and its directory is synced.
File systems can hang, so each call runs in a thread that is given up after a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, TypeVarTuple, Unpack

import anyio

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import (
    Conflict,
    DsecError,
    NotFound,
    PermissionDenied,
    StorageFull,
    Unavailable,
)
from dsec.images.disk import fsync_path
from dsec.images.store import layout
from dsec.images.store.deadlines import within
from dsec.images.store.interface import BlobRef, DocumentKind, FoundBlob, nothing
from dsec.images.store.options import StoreOptions
from dsec.images.store.source import opened
from dsec.kit.blocking import in_thread

T = TypeVar("T")
Args = TypeVarTuple("Args")

_INCOMING = "incoming"
_STALE_S = 86400.0
_MAX_STUCK = 32
"""Threads in the file system, of which half were given up: then further calls fail at once."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class DirectoryStore:
    """Blobs and documents as files below one directory (names: `layout.py`)."""

    def __init__(
        self, root: Path, options: StoreOptions | None = None, clock: Clock | None = None
    ) -> None:
        self._root = root
        self._was_there = False
        self._options = options or StoreOptions()
        self._clock = clock or SystemClock()
        self._swept = False
        self._running = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """`file://` and the directory."""
        return self._root.as_uri()

    async def put_blob(
        self, file: Path, digest: str, on_progress: Callable[[int], None] = nothing
    ) -> None:
        """Copy a file in, checking its digest; an interrupted copy begins anew."""
        target = self._blob(digest)
        if await self._do(target.is_file):
            return
        temporary = await self._do(self._prepare, target)
        try:
            async with opened(file, digest, self._options.part_bytes, on_progress) as source:
                async for part in source:
                    await self._do(_append, temporary, part)
                if source.size_bytes == 0:
                    await source.whole()  # there is no part whose reading would check it
            await self._do(_publish, temporary, target, self._root)
        finally:
            await self._discard(temporary)

    async def has_blob(self, digest: str) -> bool:
        """Whether the file is there; it is never there in part."""
        return await self._do(self._is_file, self._blob(digest))

    async def read_blob(self, digest: str, offset: int, length: int) -> bytes:
        """Read a range in a worker thread."""
        with _not_found_as("blob", digest):
            data = await self._do(_pread, self._blob(digest), offset, length)
        if len(data) < length:
            raise Unavailable(f"the blob {digest} ends before {offset + length} bytes")
        return data

    async def list_blobs(self) -> AsyncIterator[FoundBlob]:
        """All blobs, a directory at a time."""
        above = self._root / "blobs/sha256"
        for prefix in await self._do(self._names, above):
            for found in await self._do(_blobs_in, above / prefix):
                yield found

    async def delete_blob(self, digest: str) -> None:
        """Remove the file. Who has it open or mounted keeps it, but for NFS."""
        await self._do(self._remove, self._blob(digest))

    async def put_document(
        self,
        kind: DocumentKind,
        name: str,
        body: bytes,
        blobs: Sequence[BlobRef],
        *,
        absent: bool = False,
    ) -> None:
        """Write a file; what it refers to is for readers to know."""
        del blobs
        layout.check_body(body)
        target = self._root / layout.document_key(kind, name)
        temporary = await self._do(self._prepare, target)
        try:
            await self._do(_append, temporary, layout.wrap(name, body))
            await self._do(_publish_absent if absent else _publish, temporary, target, self._root)
        finally:
            await self._discard(temporary)

    async def get_document(self, kind: DocumentKind, name: str) -> bytes:
        """Read a file and check it against its header."""
        path = self._root / layout.document_key(kind, name)
        with _not_found_as("document", name):
            stored = await self._do(path.read_bytes)
        return layout.unwrap(stored, name)

    async def list_documents(self, kind: DocumentKind) -> AsyncIterator[str]:
        """Names as the files' names tell them; hashed ones from within."""
        directory = self._root / layout.kind_key(kind)
        for file in await self._do(self._names, directory):
            with contextlib.suppress(ValueError, NotFound):
                yield layout.name_in_key(file) or await self._name_within(directory / file)

    async def delete_document(self, kind: DocumentKind, name: str) -> None:
        """Remove the file."""
        await self._do(self._remove, self._root / layout.document_key(kind, name))

    def blob_path(self, digest: str) -> Path | None:
        """The blob's file, whether it is there or not."""
        return self._blob(digest)

    async def aclose(self) -> None:
        """Nothing is held."""

    def _blob(self, digest: str) -> Path:
        return self._root / layout.blob_key(digest)

    async def _name_within(self, path: Path) -> str:
        with _not_found_as("document", path.name):
            return layout.header_of(await self._do(_pread, path, 0, layout.HEADER_BYTES)).name

    def _is_file(self, path: Path) -> bool:
        if path.is_file():
            return True
        self._check_mounted()
        return False

    def _names(self, directory: Path) -> list[str]:
        try:
            return [path.name for path in directory.iterdir()]
        except FileNotFoundError:
            self._check_mounted()
            return []

    def _remove(self, path: Path) -> None:
        try:
            path.unlink()
        except FileNotFoundError:
            self._check_mounted()

    def _check_mounted(self) -> None:
        # An unmounted share looks like an empty store. What was there once is not made anew, and
        # before that the directory above tells the two apart.
        if self._root.is_dir():
            self._was_there = True
        elif self._was_there or not self._root.parent.is_dir():
            raise Unavailable(f"{self._root} is not there; is its file system mounted?")

    def _prepare(self, target: Path) -> Path:
        """Have the directories a file needs, and an empty file to write aside."""
        self._check_mounted()
        incoming = self._root / _INCOMING
        for directory in (self._root, incoming):
            directory.mkdir(mode=0o700, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            self._swept = True
            _remove_stale(incoming, self._clock.now() - _STALE_S)
        temporary = incoming / uuid.uuid4().hex
        temporary.touch(mode=0o644, exist_ok=False)
        return temporary

    async def _do(self, func: Callable[[Unpack[Args]], T], *args: *Args) -> T:
        """Call something that may hang.

        Raises:
            Unavailable, PermissionDenied, StorageFull: what the file system said.
            FileNotFoundError: for a caller to name what is missing.
        """
        return await within(
            self._options.timeout_s,
            str(self._root),
            lambda: in_thread("store", self._call, func, args, abandon=True),
        )

    def _call(self, func: Callable[[Unpack[Args]], T], args: tuple[*Args]) -> T:
        self._enter()
        try:
            return func(*args)
        except FileNotFoundError:
            self._check_mounted()
            raise
        except OSError as error:
            raise _as_ours(error, self._root) from error
        finally:
            with self._lock:
                self._running -= 1

    def _enter(self) -> None:
        with self._lock:
            if self._running >= _MAX_STUCK:
                raise Unavailable(f"{self._root} does not answer")
            self._running += 1

    async def _discard(self, temporary: Path) -> None:
        # Also when the task is being cancelled; what fails is swept later.
        with anyio.CancelScope(shield=True), contextlib.suppress(DsecError):
            await self._do(self._remove, temporary)


def _as_ours(error: OSError, root: Path) -> DsecError:
    if error.errno in _FULL:
        return StorageFull(f"the file system of {root} is full", path=str(root))
    if error.errno in _FORBIDDEN:
        return PermissionDenied(f"{root}: {error.strerror}", path=str(root))
    return Unavailable(f"{root}: {error.strerror or error}", path=str(root))


@contextlib.contextmanager
def _not_found_as(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"there is no {kind} {name} in the store", kind=kind) from None


def _pread(path: Path, offset: int, length: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)


def _blobs_in(directory: Path) -> list[FoundBlob]:
    found: list[FoundBlob] = []
    for name in (path.name for path in directory.iterdir()):
        digest = layout.digest_at(f"blobs/sha256/{directory.name}/{name}")
        with contextlib.suppress(FileNotFoundError):
            status = (directory / name).stat()
            if digest:
                found.append(FoundBlob(digest, status.st_size, status.st_mtime))
    return found


def _append(path: Path, part: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        rest = memoryview(part)
        while rest:
            rest = rest[file.write(rest) :]


def _publish(temporary: Path, target: Path, root: Path) -> None:
    """Give a file its name once it is on the disk, and have the name there too."""
    fsync_path(temporary)
    temporary.replace(target)
    _sync_above(target, root)


def _publish_absent(temporary: Path, target: Path, root: Path) -> None:
    """As `_publish`, but never in place of another file.

    Raises:
        Conflict: there is one that says something else.
    """
    fsync_path(temporary)
    try:
        target.hardlink_to(temporary)  # unlike a rename, it replaces nothing
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost, and asked for again.
        if target.read_bytes() != temporary.read_bytes():
            raise Conflict(f"{target.name} is in the store already", kind="document") from None
    _sync_above(target, root)


def _sync_above(target: Path, root: Path) -> None:
    for directory in target.parents:
        fsync_path(directory)
        if directory == root:
            return


def _remove_stale(incoming: Path, before: float) -> None:
    for path in incoming.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < before:
                path.unlink()
