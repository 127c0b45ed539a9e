"""The tar of a layer: a tree put under a path of the environment, or a tar stream moved there.

Parents the path implies are not listed, so that they stay what they are in the layers below.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsec.base.errors import InvalidRequest, Unavailable
from dsec.sdk import _sparse
from dsec.sdk._tar import BLOCK, CHUNK_BYTES, Pull, StreamReader, content, walk

KEEP = "keep"
_KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}
_KEPT_XATTRS = ("user.", "security.capability")
_REWRITTEN = frozenset({"path", "linkpath", "size"})
"""Records that a header gets anew."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How entries are written down.

    Attributes:
        owner: user and group of everything; None: as on disk.
        mtime: of everything, seconds since the epoch; None: as on disk.
        plain_modes: 0755 or 0644 instead of what this machine's umask made of them.
    """

    owner: tuple[int, int] | None = None
    mtime: int | None = None
    plain_modes: bool = False


def prefix_of(at: str) -> str:
    """An absolute path as the beginning of names: "" or "a/b/".

    Raises:
        InvalidRequest: it is not absolute, or climbs.
    """
    parts = [part for part in at.split("/") if part not in {"", "."}]
    if not at.startswith("/") or ".." in parts or "\0" in at:
        raise InvalidRequest(f"{at!r} is not an absolute path in the environment")
    return "".join(f"{part}/" for part in parts)


def parse_owner(text: str) -> tuple[int, int] | None:
    """`UID:GID`, or `keep`.

    Raises:
        InvalidRequest: it is neither.
    """
    if text == KEEP:
        return None
    user, colon, group = text.partition(":")
    numbers = (user, group if colon else user)
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise InvalidRequest(f"owner {text!r} must be UID:GID in numbers, or {KEEP}")
    return int(numbers[0]), int(numbers[1])


def pack_layer(root: Path, at: str, manner: Manner) -> Iterator[bytes]:
    """A directory's contents as the tar of a layer that has them at `at`.

    Links stay links, hard ones too; sockets are left out.

    Raises:
        InvalidRequest: a file became shorter while it was read.
    """
    prefix = prefix_of(at)
    packer = _Packer(manner)
    if prefix:
        yield from packer.entry(root, prefix.rstrip("/"))
    for path, name in walk(root):
        yield from packer.entry(path, f"{prefix}{name}")
    yield bytes(2 * BLOCK)


class _Packer:
    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._first: dict[tuple[int, int], str] = {}
        """Name under which each file with several was packed."""

    def entry(self, path: Path, name: str) -> Iterator[bytes]:
        """Header and content of one file."""
        status = path.lstat()
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            return  # a socket means nothing elsewhere
        info = self._header(status, name, kind)
        if kind == tarfile.SYMTYPE:
            info.linkname = os.readlink(path)  # noqa: PTH115 - the text of the link, not a Path
        if not self._is_link(status, info):
            info.size = status.st_size if kind == tarfile.REGTYPE else 0
            info.pax_headers = _xattrs(path)
        pieces = _sparse.pieces_of(path, status) if info.isreg() else None
        if pieces is not None:
            yield from _sparse.entry(info, path, pieces)
            return
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if info.isreg():
            yield from content(path, info.size)

    def _header(self, status: os.stat_result, name: str, kind: bytes) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type = kind
        info.mode = self._mode(status.st_mode)
        info.uid, info.gid = self._manner.owner or (status.st_uid, status.st_gid)
        info.mtime = int(status.st_mtime) if self._manner.mtime is None else self._manner.mtime
        if kind in {tarfile.CHRTYPE, tarfile.BLKTYPE}:
            info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        return info

    def _mode(self, mode: int) -> int:
        if not self._manner.plain_modes:
            return stat.S_IMODE(mode)
        if stat.S_ISLNK(mode):
            return 0o777
        return 0o755 if stat.S_ISDIR(mode) or mode & 0o100 else 0o644

    def _is_link(self, status: os.stat_result, info: tarfile.TarInfo) -> bool:
        if status.st_nlink < 2 or stat.S_ISDIR(status.st_mode):
            return False
        first = self._first.setdefault((status.st_dev, status.st_ino), info.name)
        if first == info.name:
            return False
        info.type, info.linkname = tarfile.LNKTYPE, first
        return True


def _xattrs(path: Path) -> dict[str, str]:
    if not hasattr(os, "listxattr"):
        return {}
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return {}  # a file system without any
    return {
        f"SCHILY.xattr.{name}": os.getxattr(path, name, follow_symlinks=False).decode(
            "utf-8", "surrogateescape"
        )
        for name in sorted(names)
        if name.startswith(_KEPT_XATTRS)
    }


def directory(at: str, mode: int, owner: tuple[int, int], mtime: float) -> bytes:
    """The header of the directory at `at`; nothing for the root, which every environment has."""
    prefix = prefix_of(at)
    if not prefix:
        return b""
    info = tarfile.TarInfo(prefix.rstrip("/"))
    info.type, info.mode, info.mtime = tarfile.DIRTYPE, mode, int(mtime)
    info.uid, info.gid = owner
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def rebase(pull: Pull, at: str, manner: Manner) -> Iterator[bytes]:
    """A tar stream with everything in it moved below `at`.

    Raises:
        Unavailable: the stream is no tar, or broke off.
    """
    prefix = prefix_of(at)
    try:
        with tarfile.open(
            fileobj=StreamReader(pull),
            mode="r|",
            bufsize=CHUNK_BYTES,
            encoding="utf-8",
            errors="surrogateescape",
        ) as archive:
            for member in archive:
                vars(archive)["members"] = []  # else it keeps every header
                yield from _moved(archive, member, prefix, manner)
        while pull():
            pass  # an error after the last entry must not go unnoticed
    except (tarfile.TarError, EOFError) as exc:
        raise Unavailable(f"the tar stream is broken: {exc}") from exc
    yield bytes(2 * BLOCK)


def _moved(
    archive: tarfile.TarFile, member: tarfile.TarInfo, prefix: str, manner: Manner
) -> Iterator[bytes]:
    name = _plain(member.name)
    if not name:
        return  # the directory itself
    file = archive.extractfile(member) if member.isreg() else None
    if member.islnk():
        member.linkname = f"{prefix}{_plain(member.linkname)}"
    member.name = f"{prefix}{name}"
    if file is not None:
        member.type = tarfile.REGTYPE  # a sparse file is written out
    if manner.owner is not None:
        member.uid, member.gid = manner.owner
    member.pax_headers = _kept(member.pax_headers, manner)
    yield member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    if file is None:
        return
    while data := file.read(CHUNK_BYTES):
        yield data
    if member.size % BLOCK:
        yield bytes(BLOCK - member.size % BLOCK)


def _kept(headers: Mapping[str, str], manner: Manner) -> dict[str, str]:
    """Records of an entry that still hold once it is moved, and written out if it was sparse."""
    gone = _REWRITTEN if manner.owner is None else _REWRITTEN | {"uid", "gid"}
    return {
        key: text
        for key, text in headers.items()
        if key not in gone and not key.startswith("GNU.sparse.")
    }


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in {"", "."})
