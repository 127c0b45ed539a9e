"""What a difference changes of what it lies over, by path. Blocks."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsec.images.erofs.scan import is_opaque, open_directory, opened_directory
from dsec.images.erofs.tree import OPAQUE_XATTR, Inode, Tree
from dsec.images.upper import own_xattrs
from dsec.wire.sandbox import DiffEntry, FileKind

_KINDS: dict[int, FileKind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def list_changes(difference: Tree, lowers: Sequence[Path]) -> list[DiffEntry]:
    """Compare a difference with what it lies over, by path.

    A file that was copied up counts as modified, whatever it says: that its content is the same
    would be known only by reading all of it. A directory counts if its own attributes differ.

    Args:
        difference: with its deletions and opaque directories.
        lowers: mounted layers below it, topmost first.

    Raises:
        OSError: one cannot be read.
    """
    with contextlib.ExitStack() as opened:
        roots = [opened.enter_context(opened_directory(str(lower))) for lower in lowers]
        found = list(_Comparison(roots).run(difference))
    return sorted(found, key=lambda entry: entry.path_b64 or entry.path.encode())


@dataclass(slots=True)
class _Directory:
    """A directory of the difference, and the lower ones that are seen under its name."""

    parts: tuple[str, ...]
    inode: Inode
    lowers: list[int]
    """Roots of the layers that have it, topmost first."""


class _Comparison:
    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots

    def run(self, difference: Tree) -> Iterator[DiffEntry]:
        """All changes, in no order."""
        pending = [_Directory((), difference.root, list(self._roots))]
        while pending:
            place = pending.pop()
            with contextlib.ExitStack() as opened:
                below = [(root, self._open(root, place, opened)) for root in place.lowers]
                yield from self._compare(place, below, pending)

    @staticmethod
    def _open(root: int, place: _Directory, opened: contextlib.ExitStack) -> int:
        descriptor = open_directory(root, place.parts)
        opened.callback(os.close, descriptor)
        return descriptor

    def _compare(
        self, place: _Directory, below: list[tuple[int, int]], pending: list[_Directory]
    ) -> Iterator[DiffEntry]:
        for name, inode in place.inode.children.items():
            text = os.fsdecode(name)
            path = _path(place, text)
            lower = _look(below, text)
            if inode.is_whiteout:
                if lower is not None:
                    yield _removed(path, lower)
                continue
            if change := _change(inode, lower, below, text):
                yield change_of(path, change, inode)
            if inode.is_dir:
                inner = _merged(below, text) if lower is not None else []
                pending.append(_Directory((*place.parts, text), inode, inner))
        if place.inode.is_opaque:
            yield from _hidden(place, below)


def _change(
    inode: Inode, lower: os.stat_result | None, below: list[tuple[int, int]], name: str
) -> str:
    """What it is, "" if it is as it was."""
    if lower is None:
        return "added"
    if not (inode.is_dir and stat.S_ISDIR(lower.st_mode)):
        return "modified"
    same = (inode.mode, inode.uid, inode.gid) == (lower.st_mode, lower.st_uid, lower.st_gid)
    return "" if same and _same_xattrs(inode, below, name) else "modified"


def _same_xattrs(inode: Inode, below: list[tuple[int, int]], name: str) -> bool:
    ours = {n: v for n, v in inode.xattrs.items() if n != OPAQUE_XATTR}
    directory = next(d for _, d in below if _lstat(d, name) is not None)
    with opened_directory(name, directory) as lower:
        names = [os.fsencode(n) for n in os.listxattr(lower)]
        theirs = own_xattrs({n: os.getxattr(lower, n) for n in names}, is_directory=False)
    return ours == theirs


def _look(below: list[tuple[int, int]], name: str) -> os.stat_result | None:
    """What was seen under a name."""
    for _, directory in below:
        if status := _lstat(directory, name):
            return None if _is_whiteout(status) else status
    return None


def _merged(below: list[tuple[int, int]], name: str) -> list[int]:
    """The layers whose directories are seen under a name."""
    found = []
    for root, directory in below:
        status = _lstat(directory, name)
        if status is None:
            continue
        if not stat.S_ISDIR(status.st_mode):
            break
        found.append(root)
        with opened_directory(name, directory) as inner:
            if is_opaque(inner):
                break
    return found


def _hidden(place: _Directory, below: list[tuple[int, int]]) -> Iterator[DiffEntry]:
    """What an opaque directory hides and has nothing instead of."""
    names = {name for _, directory in below for name in _names(directory)}
    for name in names:
        lower = _look(below, name)
        if lower is not None and os.fsencode(name) not in place.inode.children:
            yield _removed(_path(place, name), lower)


def _names(directory: int) -> list[str]:
    return os.listdir(directory)


def _lstat(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


# -- as the API has it -----------------------------------------------------------------------------


def _path(place: _Directory, name: str) -> bytes:
    return b"/" + os.fsencode("/".join((*place.parts, name)))


def change_of(path: bytes, change: str, inode: Inode) -> DiffEntry:
    """An entry for what the difference has."""
    size = len(inode.target) if stat.S_ISLNK(inode.mode) else inode.size
    return _entry(path, change, inode.mode, size)


def _removed(path: bytes, lower: os.stat_result) -> DiffEntry:
    return _entry(path, "removed", lower.st_mode, 0)


def _entry(path: bytes, change: str, mode: int, size: int) -> DiffEntry:
    text = path.decode("utf-8", "backslashreplace")
    return DiffEntry(
        path=text,
        path_b64=b"" if text.encode() == path else path,
        change=change,  # type: ignore[arg-type] # one of three
        kind=_KINDS[stat.S_IFMT(mode)],
        size_bytes=size,
        mode=stat.S_IMODE(mode),
    )
