"""A directory on disk into a tree and a data file.

Whoever owns the directory may change it meanwhile. So every directory is opened from the root,
component by component, never through a symbolic link: what is found was in the directory at some
moment, and nothing outside is. Depth costs no descriptors.
"""

# Every call counts, and must be relative to an open directory: `os`, not pathlib.

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dsec.base.errors import InvalidRequest
from dsec.images.erofs.data import DataWriter, Zeros
from dsec.images.erofs.tree import OPAQUE_XATTR, Extent, Inode, Tree

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PIECE = 1 << 20
_SPARSE_FROM = 64 << 10
"""Files of fewer bytes are read whole, holes or not."""
_MAX_DEPTH = 256
"""As for archives: deeper trees make every program after this one slow."""
CHANGED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODATA})
"""What a call says whose file went away or became another meanwhile."""

_Pending = tuple[tuple[str, ...], Inode]
"""Where a directory is below the root, and what becomes of it."""


def scan(directory: Path, data: DataWriter) -> Tree:
    """Read a directory: all kinds of files, hard links, xattrs, holes. Blocks.

    An overlay's upper directory keeps its whiteouts and `trusted.overlay` xattrs as they are.

    Args:
        directory: its root; not a symbolic link.
        data: takes the content; its device becomes the tree's when it is finished, if it has any.
            The tree is returned without devices.

    Raises:
        InvalidRequest: a file system is mounted inside, directories are nested deeper than 256, or
            something changed while it was read.
        StorageFull: no room for the data.
        OSError: something cannot be read.
    """
    root = os.open(directory, _DIRECTORY)
    try:
        return _Scan(root, data).run()
    finally:
        os.close(root)


class _Scan:
    def __init__(self, root: int, data: DataWriter) -> None:
        self._root = root
        self._device = os.fstat(root).st_dev
        self._data = data
        self._links: dict[tuple[int, int], Inode] = {}
        """Inodes with several names, by device and number on disk."""

    def run(self) -> Tree:
        """Read it all, a directory's files before what is below it."""
        root = Inode(stat.S_IFDIR)
        pending: list[_Pending] = [((), root)]
        while pending:
            parts, inode = pending.pop()
            try:
                below = self._read_directory(parts, inode)
            except OSError as error:
                if error.errno in CHANGED:
                    raise InvalidRequest(f"{show(parts)} changed while it was read") from error
                raise
            pending.extend(reversed(below))
        return Tree(root)

    def _read_directory(self, parts: tuple[str, ...], inode: Inode) -> list[_Pending]:
        """Fill a directory's inode; returns the directories in it, still empty."""
        directory = open_directory(self._root, parts)
        try:
            status = os.fstat(directory)
            if status.st_dev != self._device:
                raise InvalidRequest(f"{show(parts)} is the root of another file system")
            fill(inode, status, directory)
            return self._read_names(directory, parts, inode)
        finally:
            os.close(directory)

    def _read_names(self, directory: int, parts: tuple[str, ...], inode: Inode) -> list[_Pending]:
        below: list[_Pending] = []
        for name in sorted(os.listdir(directory), key=os.fsencode):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                child = Inode(stat.S_IFDIR)
                below.append(((*parts, name), child))
            else:
                child = self._read_file(directory, name, status)
            inode.children[os.fsencode(name)] = child
        return below

    def _read_file(self, directory: int, name: str, status: os.stat_result) -> Inode:
        """The inode of what is no directory."""
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and key in self._links:
            return self._links[key]
        inode = Inode(status.st_mode)
        if status.st_nlink > 1:
            self._links[key] = inode
        if stat.S_ISREG(status.st_mode):
            self._read_regular(directory, name, inode)
        else:
            fill_special(inode, status, directory, name)
        return inode

    def _read_regular(self, directory: int, name: str, inode: Inode) -> None:
        file, status = open_regular(name, directory)
        try:
            fill(inode, status, file)
            inode.size = status.st_size
            inode.extents = keep_content(self._data, file, status)
        finally:
            os.close(file)


# -- calls that follow no link, for whoever reads such a directory ---------------------------------


def open_directory(root: int, parts: tuple[str, ...]) -> int:
    """Open a directory below another, one component after the other.

    Raises:
        InvalidRequest: it is nested too deep.
        OSError: something on the way is no directory, or gone.
    """
    if len(parts) > _MAX_DEPTH:
        raise InvalidRequest(f"{show(parts)} is nested deeper than {_MAX_DEPTH} directories")
    descriptor = os.open(".", _DIRECTORY, dir_fd=root)
    for part in parts:
        try:
            deeper = os.open(part, _DIRECTORY, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = deeper
    return descriptor


@contextlib.contextmanager
def opened_directory(name: str, parent: int | None = None) -> Iterator[int]:
    """A directory by its path or, in an open one, its name; closed at the end.

    Raises:
        OSError: it is no directory, or gone.
    """
    descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_opaque(directory: int) -> bool:
    """Whether an open directory of a layer hides those below it."""
    try:
        return os.getxattr(directory, OPAQUE_XATTR) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def open_regular(name: str, directory: int) -> tuple[int, os.stat_result]:
    """Open a regular file, and look at what was opened.

    Raises:
        OSError: it is gone, or something else by now.
    """
    file = os.open(name, _FILE, dir_fd=directory)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "no regular file any more", name)
    return file, status


def keep_content(data: DataWriter, file: int, status: os.stat_result) -> list[Extent]:
    """Append an open file's content, holes as holes; where it lies.

    Raises:
        InvalidRequest: it became shorter.
        StorageFull: no room for the data.
    """
    size = status.st_size
    if size >= _SPARSE_FROM and status.st_blocks * 512 < size:
        return data.append(_sparse_pieces(file, size), size)
    return data.append(_Descriptor(file), size)


def show(parts: tuple[str, ...]) -> str:
    """A place below the root, for messages."""
    path = "/".join(parts)
    return ascii(path if len(path) <= 200 else f"{path[:200]}...")[1:-1] or "the directory"


def fill_special(inode: Inode, status: os.stat_result, directory: int, name: str) -> None:
    """What an inode has that is neither a directory nor a regular file.

    Raises:
        OSError: it is gone, or something else by now.
    """
    # No descriptor of a link or a device has xattrs; this name has one component to follow.
    fill(inode, status, f"/proc/self/fd/{directory}/{name}")
    if stat.S_ISLNK(status.st_mode):
        inode.target = os.fsencode(_target(directory, name))
    elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        inode.rdev = status.st_rdev


def _target(directory: int, name: str) -> str:
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise FileNotFoundError(errno.ENOENT, "no link any more", name) from error
        raise


def fill(inode: Inode, status: os.stat_result, where: int | str) -> None:
    """What an inode of any kind has."""
    inode.mode = status.st_mode
    inode.uid = status.st_uid
    inode.gid = status.st_gid
    inode.mtime_ns = status.st_mtime_ns
    inode.xattrs = _xattrs(where)


def _xattrs(where: int | str) -> dict[bytes, bytes]:
    follow = isinstance(where, int)
    try:
        names = os.listxattr(where, follow_symlinks=follow)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    return {os.fsencode(n): os.getxattr(where, n, follow_symlinks=follow) for n in names}


class _Descriptor:
    """An open file, read without a buffer."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self, size: int, /) -> bytes:
        """At most that many bytes, none at the end."""
        return os.read(self._file, size)


def _sparse_pieces(file: int, size: int) -> Iterator[bytes | Zeros]:
    """A file's content without reading its holes; less of it if the file shrinks meanwhile."""
    at = 0
    while at < size:
        start = _find_data(file, at, size)
        if start > at:
            yield Zeros(start - at)
        if start >= size:
            return
        at = min(os.lseek(file, start, os.SEEK_HOLE), size)
        if at <= start:
            return
        yield from _read_pieces(file, start, at)


def _find_data(file: int, at: int, size: int) -> int:
    try:
        return min(os.lseek(file, at, os.SEEK_DATA), size)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        raise


def _read_pieces(file: int, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        piece = os.pread(file, min(_PIECE, end - start), start)
        if not piece:
            return
        yield piece
        start += len(piece)
