"""A sandbox's upper directory, read while it changes and again while it stands still.

The first readings keep what hardly changes any more; the last takes from them what is still the
same, and so is short. A file is the same if device, inode, size, mtime and ctime are: nothing in a
sandbox can set a ctime. Three things leave no trace there, so not all that is read is kept:

* A call that writes sets the ctime when it begins, however long it takes, and a store into a shared
  mapping sets it once for many. What somebody has open for writing, or mapped so, is not read before
  it stands still. Who opens it later sets a later ctime before anything is written.
* A change within the tick of the clock that the file was read in. What was changed that lately is
  read again.

The sandbox's root owns the directory and is hostile: what is opened is opened from the root, one
component after the other, following no link (`erofs.scan`).
"""

# Every call counts, and must be relative to an open directory: `os`, not pathlib.

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from dsec.base.errors import InvalidRequest, PayloadTooLarge
from dsec.images.erofs.data import DataWriter
from dsec.images.erofs.scan import (
    CHANGED,
    fill,
    fill_special,
    keep_content,
    open_directory,
    open_regular,
    show,
)
from dsec.images.erofs.tree import OPAQUE_XATTR, Inode, Tree
from dsec.images.oci.layer import Limits
from dsec.images.residue import MAX_READ_BYTES, Fate, Sieve
from dsec.linux.leases import has_writer

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OVERLAY = b"trusted.overlay."
_ESCAPED = b"trusted.overlay.overlay."
"""Of an overlay within the sandbox: shown to it as `trusted.overlay.`, and kept."""
_ELSEWHERE = (b"trusted.overlay.metacopy", b"trusted.overlay.redirect")
_KEPT = (b"user.", b"system.posix_acl_", _ESCAPED)
_CAPABILITY = b"security.capability"
_SECOND_NS = 10**9
_REALTIME_COARSE = 5
"""CLOCK_REALTIME_COARSE: what the kernel takes the times of files from."""

Key = tuple[int, int]
"""Device and inode."""
_Stamp = tuple[int, int, int, int]
"""Mode, size, mtime and ctime."""


@dataclass(slots=True)
class _Known:
    """A file as it was read."""

    stamp: _Stamp
    inode: Inode


@dataclass(slots=True)
class _Place:
    """A directory still to be read."""

    parts: tuple[str, ...]
    path: bytes
    """As the sandbox has it, without a slash at the end."""
    inode: Inode
    fate: Fate
    """Of what is in it."""


@dataclass(slots=True)
class Reading:
    """What one reading found."""

    tree: Tree
    entries: int = 0
    """Looked at, left out or not."""
    size_bytes: int = 0
    """Of all files that are not left out, those with several names once."""
    read_bytes: int = 0
    """Of files that were not known from before."""
    left_out: int = 0
    cleaned: list[tuple[Inode, bytes]] = field(default_factory=list)
    """Directories by parent and name that go if nothing in them stays, parents first."""


class Upper:
    """An upper directory. A context manager; one thread at a time. Blocks."""

    def __init__(
        self, directory: Path, sieve: Sieve, limits: Limits, data: DataWriter | None = None
    ) -> None:
        """Open it.

        Args:
            directory: of an overlay, with its whiteouts and `trusted.overlay` xattrs.
            sieve: what is left out.
            limits: how much it may hold.
            data: takes the content; without it, only names and attributes are read.

        Raises:
            OSError: it cannot be opened.
        """
        self._root = os.open(directory, _ROOT)
        self._device = os.fstat(self._root).st_dev
        self._sieve = sieve
        self.limits = limits
        self._data = data
        self._known: dict[Key, _Known] = {}
        self._sure: dict[Key, _Known] = {}
        """Of `_known`, as the reading under way finds it again; then it takes its place."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._root)

    def read(self, *, still: bool) -> Reading:
        """Read what is new since the last reading.

        Args:
            still: nothing changes meanwhile; else what does is passed over, and of what may do so
                without a trace there is no content.

        Raises:
            InvalidRequest: it cannot be a layer; or, if it stands still, it did not.
            PayloadTooLarge: it holds more than the limits allow.
            StorageFull: no room for the data.
            OSError: something cannot be read.
        """
        self._sure = {}
        reading = _Pass(self, still=still).run()
        self._known = self._sure
        return reading

    # -- for a pass -----------------------------------------------------------------------------

    def open(self, parts: tuple[str, ...]) -> int:
        """Open a directory in it."""
        return open_directory(self._root, parts)

    def check_device(self, status: os.stat_result, parts: tuple[str, ...]) -> None:
        """Refuse what is mounted inside. Raises InvalidRequest."""
        if status.st_dev != self._device:
            raise InvalidRequest(f"{show(parts)} is the root of another file system")

    @property
    def sieve(self) -> Sieve:
        """What is left out."""
        return self._sieve

    def check_entries(self, count: int) -> None:
        """Raises PayloadTooLarge."""
        if count > self.limits.entries:
            raise PayloadTooLarge(f"it has more than {self.limits.entries} entries")

    def check_size(self, size_bytes: int) -> None:
        """Raises PayloadTooLarge, if content is taken at all."""
        if self._data is not None and size_bytes > self.limits.size_bytes:
            raise PayloadTooLarge(f"it holds more than {self.limits.size_bytes} bytes")

    def known(self, status: os.stat_result) -> Inode | None:
        """What was read of a file that is the same as then."""
        key = (status.st_dev, status.st_ino)
        known = self._sure.get(key) or self._known.get(key)
        if known is None or known.stamp != _stamp_of(status):
            return None
        self._sure[key] = known
        return known.inode

    def keep(self, status: os.stat_result, inode: Inode, tick_ns: int) -> None:
        """Know a file from here on, if every later change of it will show."""
        changed_ns = status.st_ctime_ns
        if changed_ns % _SECOND_NS == 0:  # a file system that has whole seconds only
            changed_ns += _SECOND_NS
        if changed_ns < tick_ns:
            self._sure[status.st_dev, status.st_ino] = _Known(_stamp_of(status), inode)

    def content(
        self, file: int, status: os.stat_result, inode: Inode, *, still: bool
    ) -> int | None:
        """Take over a file's content; how much that was, None if it may change without a trace."""
        inode.size = status.st_size
        if self._data is None:
            return 0
        if not still and has_writer(file):
            return None
        inode.extents = keep_content(self._data, file, status)
        return status.st_size


class _Pass:
    """One reading."""

    def __init__(self, upper: Upper, *, still: bool) -> None:
        self._upper = upper
        self._still = still
        self._links: dict[Key, Inode] = {}
        """Inodes with several names."""
        self._found = Reading(Tree(Inode(stat.S_IFDIR)))

    def run(self) -> Reading:
        """Read it all, a directory's files before what is below it."""
        root = _Place((), b"", self._found.tree.root, self._upper.sieve.directory(b"/", Fate.KEPT))
        pending = [root]
        while pending:
            place = pending.pop()
            below: list[_Place] = []
            with self._changes(place.parts):
                below = self._read_directory(place)
            pending.extend(reversed(below))
        self._drop_emptied()
        root.inode.xattrs.pop(OPAQUE_XATTR, None)  # a root is merged in any case
        return self._found

    @contextlib.contextmanager
    def _changes(self, parts: tuple[str, ...]) -> Iterator[None]:
        """Pass over what went away or became another meanwhile, if it may."""
        try:
            yield
        except OSError as error:
            if error.errno not in CHANGED:
                raise
            if self._still:
                raise InvalidRequest(f"{show(parts)} changed while it was read") from error

    def _read_directory(self, place: _Place) -> list[_Place]:
        """Fill a directory's inode; returns the directories in it, still empty."""
        directory = self._upper.open(place.parts)
        try:
            status = os.fstat(directory)
            self._upper.check_device(status, place.parts)
            self._describe(place.inode, status, directory)
            return self._read_names(directory, place)
        finally:
            os.close(directory)

    def _describe(self, inode: Inode, status: os.stat_result, directory: int) -> None:
        tick_ns = _tick_ns()
        known = self._upper.known(status)
        if known is None:
            fill(inode, status, directory)
            inode.xattrs = own_xattrs(inode.xattrs, is_directory=True)
            self._upper.keep(status, inode, tick_ns)
            return
        inode.mode, inode.uid, inode.gid = known.mode, known.uid, known.gid
        inode.mtime_ns, inode.xattrs = known.mtime_ns, known.xattrs

    def _read_names(self, directory: int, place: _Place) -> list[_Place]:
        below: list[_Place] = []
        names = _names(directory, self._upper.limits.entries - self._found.entries)
        self._found.entries += len(names)
        self._upper.check_entries(self._found.entries)
        for name in sorted(names, key=os.fsencode):
            with self._changes((*place.parts, name)):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    below += self._directory(place, name)
                else:
                    self._file(place, directory, name, status)
        return below

    def _directory(self, place: _Place, name: str) -> list[_Place]:
        raw = os.fsencode(name)
        path = b"%s/%s" % (place.path, raw)
        fate = self._upper.sieve.directory(path, place.fate)
        if fate is Fate.EXCLUDED:
            self._found.left_out += 1
            return []
        inner = _Place((*place.parts, name), path, Inode(stat.S_IFDIR), fate)
        place.inode.children[raw] = inner.inode
        if place.fate is Fate.CLEANED:
            self._found.cleaned.append((place.inode, raw))
        return [inner]

    def _file(self, place: _Place, directory: int, name: str, status: os.stat_result) -> None:
        """Take over what is no directory."""
        raw = os.fsencode(name)
        path = b"%s/%s" % (place.path, raw)
        fate = self._fate(place, path, directory, name, status)
        if fate is not Fate.KEPT:
            self._found.left_out += 1
            return
        place.inode.children[raw] = self._inode(directory, name, status)

    def _fate(
        self, place: _Place, path: bytes, directory: int, name: str, status: os.stat_result
    ) -> Fate:
        """A deletion stays: what was deleted must not come back. The caller's globs are stronger."""
        sieve = self._upper.sieve
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            return Fate.EXCLUDED if sieve.excludes(path) else Fate.KEPT
        return sieve.file(path, place.fate, partial(_beginning, directory, name, status))

    def _inode(self, directory: int, name: str, status: os.stat_result) -> Inode:
        key = (status.st_dev, status.st_ino)
        inode = self._links.get(key)
        if inode is None:
            inode = self._upper.known(status)
            if inode is None:
                inode = self._read(directory, name, status)
            else:
                self._count(inode.size)
        if status.st_nlink > 1:
            self._links[key] = inode
        return inode

    def _count(self, size_bytes: int) -> None:
        self._found.size_bytes += size_bytes
        self._upper.check_size(self._found.size_bytes)

    def _read(self, directory: int, name: str, status: os.stat_result) -> Inode:
        tick_ns = _tick_ns()
        inode = Inode(status.st_mode)
        if stat.S_ISREG(status.st_mode):
            return self._read_regular(directory, name, inode, tick_ns)
        fill_special(inode, status, directory, name)
        inode.xattrs = own_xattrs(inode.xattrs, is_directory=False)
        self._upper.keep(status, inode, tick_ns)
        return inode

    def _read_regular(self, directory: int, name: str, inode: Inode, tick_ns: int) -> Inode:
        file, status = open_regular(name, directory)
        try:
            fill(inode, status, file)
            inode.xattrs = own_xattrs(inode.xattrs, is_directory=False)
            self._count(status.st_size)
            read_bytes = self._content(file, status, inode)
        finally:
            os.close(file)
        if read_bytes is not None:
            self._found.read_bytes += read_bytes
            self._upper.keep(status, inode, tick_ns)
        return inode

    def _content(self, file: int, status: os.stat_result, inode: Inode) -> int | None:
        try:
            return self._upper.content(file, status, inode, still=self._still)
        except InvalidRequest as error:  # it became shorter
            if self._still:
                raise
            raise FileNotFoundError(2, str(error)) from error

    def _drop_emptied(self) -> None:
        """Remove the directories of residue that nothing is left in; a hiding one hides on."""
        for parent, name in reversed(self._found.cleaned):
            inode = parent.children[name]
            if not inode.children and not inode.is_opaque:
                del parent.children[name]
                self._found.left_out += 1


def own_xattrs(xattrs: dict[bytes, bytes], *, is_directory: bool) -> dict[bytes, bytes]:
    """Those of a file itself, and not what overlayfs notes about where it came from.

    Raises:
        InvalidRequest: the file's content or name is elsewhere.
    """
    if any(name in xattrs for name in _ELSEWHERE):
        raise InvalidRequest("the upper directory refers to the layers below; it cannot be packed")
    kept = {n: v for n, v in xattrs.items() if n.startswith(_KEPT) or n == _CAPABILITY}
    if is_directory and xattrs.get(OPAQUE_XATTR) == b"y":
        kept[OPAQUE_XATTR] = b"y"
    return kept


def _names(directory: int, most: int) -> list[str]:
    """What is in a directory; of more than that many names, one more."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in islice(entries, most + 1)]


def _beginning(directory: int, name: str, status: os.stat_result) -> bytes:
    if not stat.S_ISREG(status.st_mode):
        return b""
    file, _ = open_regular(name, directory)
    try:
        return os.pread(file, MAX_READ_BYTES, 0)
    finally:
        os.close(file)


def _stamp_of(status: os.stat_result) -> _Stamp:
    return status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _tick_ns() -> int:
    """What the kernel would write into a file changed now."""
    return time.clock_gettime_ns(_REALTIME_COARSE)
