"""The files of one device in the node's cache (spec/filler.md): made, checked, given up.

A directory counts for what its `state` says. Without one, or with one of another boot that was not
complete, its chunks count for nothing: then `state` goes first and comes back last, so that a kill
in between is the same as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from dsec.base.errors import InvalidRequest
from dsec.images.disk import fsync_path, full_disk_named, write_atomically
from dsec.images.lazy.chunkmap import ChunkMap
from dsec.images.pack import ENTRY_BYTES
from dsec.linux.files import punch_hole
from dsec.wire.filler import OpenData

_BLOCK = 4096
_STAT_BLOCK = 512


class State(Struct, kw_only=True, frozen=True):
    """`state`: what the directory holds."""

    digest: str
    size_bytes: int
    chunk_bytes: int
    table_sha256: str
    boot_id: str
    """The boot the map belongs to."""
    complete: bool = False
    """Every chunk is here and on the disk: then any boot may use them."""


class CachedData:
    """An open device's files. All of it blocks, except through `map`."""

    def __init__(self, directory: Path, state: State, table: bytes) -> None:
        """Open what is there; see `open_cached`."""
        self.directory = directory
        self.table = table
        self.state = state
        self.map = ChunkMap(directory / "map", chunk_count(state.size_bytes, state.chunk_bytes))
        try:
            self.fd = os.open(directory / "data", os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            self.map.close()
            raise

    @property
    def allocated_bytes(self) -> int:
        """What the data takes of the disk."""
        return os.fstat(self.fd).st_blocks * _STAT_BLOCK

    @property
    def present_bytes(self) -> int:
        """What is here, uncompressed."""
        count = self.map.present(0, self.map.count)
        surplus = self.map.count * self.state.chunk_bytes - self.state.size_bytes
        last_here = self.map.covers(self.map.count - 1, self.map.count)
        return count * self.state.chunk_bytes - (surplus if last_here else 0)

    def write(self, chunk: int, data: bytes) -> None:
        """Write chunks that follow each other; they are not marked yet.

        Raises:
            OSError: among others ENOSPC.
        """
        offset = chunk * self.state.chunk_bytes
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, offset)
            offset, view = offset + written, view[written:]

    def seal(self) -> None:
        """Write down that every chunk is here, after bringing them to the disk."""
        os.fdatasync(self.fd)
        self.map.flush()
        self._save(complete=True)

    def unseal(self, boot: str) -> None:
        """Bind the map to this boot again.

        Before anything is punched: a map that was not written back after it would promise zeros
        after a power cut.
        """
        if self.state.complete:
            self._save(complete=False, boot=boot)

    def punch(self, first: int, end: int) -> int:
        """Give chunks back to the disk that are unmarked; returns the bytes freed."""
        before = self.allocated_bytes
        offset = first * self.state.chunk_bytes
        length = min(end * self.state.chunk_bytes, self.state.size_bytes) - offset
        punch_hole(self.fd, offset, length)
        return max(0, before - self.allocated_bytes)

    def close(self) -> None:
        """Give the descriptors up; when it was last used is left on the directory."""
        self.map.close()
        os.close(self.fd)
        with contextlib.suppress(OSError):
            os.utime(self.directory)

    def _save(self, *, complete: bool, boot: str = "") -> None:
        state = msgspec.structs.replace(
            self.state, complete=complete, boot_id=boot or self.state.boot_id
        )
        write_atomically(self.directory / "state", msgspec.json.encode(state), self.directory)
        self.state = state


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    """Chunks of a device."""
    return -(-size_bytes // chunk_bytes)


def open_cached(directory: Path, request: OpenData, boot: str) -> CachedData:
    """Make or open the files of a device. Blocks.

    Args:
        directory: the device's own.
        request: what it is, and where its table lies.
        boot: the running kernel's.

    Raises:
        InvalidRequest: sizes and table do not fit together.
        StorageFull: no room for map and table.
    """
    if request.size_bytes % _BLOCK or request.chunk_bytes % _BLOCK:
        raise InvalidRequest(f"sizes must be multiples of {_BLOCK}")
    with full_disk_named(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = _read_state(directory)
        table = _checked_table(request)
        _refuse_damaged_copy(directory, request, found, table)
        wanted = State(
            digest=request.digest,
            size_bytes=request.size_bytes,
            chunk_bytes=request.chunk_bytes,
            table_sha256=hashlib.sha256(table).hexdigest(),
            boot_id=boot,
        )
        if found is None or not _still_good(directory, found, wanted):
            _begin_anew(directory, wanted)
        elif found.complete:
            wanted = msgspec.structs.replace(wanted, complete=True)
        _write_down(directory, found, wanted, table)
        return CachedData(directory, wanted, table)


def _checked_table(request: OpenData) -> bytes:
    try:
        table = Path(request.table).read_bytes()
    except OSError as exc:
        raise InvalidRequest(f"cannot read the table {request.table}: {exc.strerror}") from exc
    expected = chunk_count(request.size_bytes, request.chunk_bytes) * ENTRY_BYTES
    if len(table) != expected:
        raise InvalidRequest(f"the table {request.table} has {len(table)} bytes, not {expected}")
    return table


def _refuse_damaged_copy(
    directory: Path, request: OpenData, found: State | None, table: bytes
) -> None:
    """Our own copy is given when a worker starts again: it must be what was copied."""
    own = Path(request.table) == directory / "table"
    if own and (found is None or hashlib.sha256(table).hexdigest() != found.table_sha256):
        raise InvalidRequest(f"the table {request.table} is damaged")


def _read_state(directory: Path) -> State | None:
    try:
        return msgspec.json.decode((directory / "state").read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError):
        return None


def _still_good(directory: Path, found: State, wanted: State) -> bool:
    same = (found.size_bytes, found.chunk_bytes) == (wanted.size_bytes, wanted.chunk_bytes)
    timely = found.complete or found.boot_id == wanted.boot_id
    count = chunk_count(wanted.size_bytes, wanted.chunk_bytes)
    return (
        same
        and timely
        and _size(directory / "data") == wanted.size_bytes
        and _size(directory / "map") == count
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _begin_anew(directory: Path, state: State) -> None:
    if (directory / "state").exists():
        # On the disk too: an old state must not come back beside the new files.
        (directory / "state").unlink()
        fsync_path(directory)
    for leftover in directory.glob("*.write"):
        leftover.unlink()
    # New inodes: what a mount of an earlier time has open may be marked by fanotify, and to truncate
    # it would wait for an answer that nobody gives while we start. Its readers are denied.
    for name in ("data", "map"):
        (directory / name).unlink(missing_ok=True)
        os.close(os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    os.truncate(directory / "data", state.size_bytes)
    (directory / "map").write_bytes(bytes(chunk_count(state.size_bytes, state.chunk_bytes)))


def _write_down(directory: Path, found: State | None, state: State, table: bytes) -> None:
    """Unsynced: what a power cut takes of it counted for this boot only."""
    if found is None or found.table_sha256 != state.table_sha256:
        _replace(directory / "table", table)
    if found != state or not (directory / "state").exists():
        _replace(directory / "state", msgspec.json.encode(state))


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.write")
    temporary.write_bytes(data)
    temporary.replace(path)
