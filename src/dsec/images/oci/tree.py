"""Entries of a layer's tar, one by one, into a directory with overlayfs's marks.

`.wh.x` becomes a 0:0 character device, `.wh..wh..opq` the xattr `trusted.overlay.opaque`. A tar
may lean on the layers below it: by a hard link to a file of theirs (copied up), by parents it does
not list (their owner and mode are taken from below) or by going through a symbolic link of theirs.
Then the result fits over those layers alone, and the report says so.

Nothing is ever written through a name that exists: what is in the way is removed and files are
made with O_EXCL, so neither a symbolic link nor a device node nor a hard link planted by an earlier
entry is followed. The walk never leaves the root; the caller's chroot is the second wall.
"""

# Names are arbitrary bytes and every call counts: plain strings and `os`, not pathlib.
# ruff: noqa: PTH101, PTH102, PTH108, PTH115, PTH123, PTH208, PTH211

from __future__ import annotations

import base64
import errno
import os
import shutil
import stat
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import IO
from urllib.parse import unquote

from dsec.base.errors import InvalidRequest, PayloadTooLarge

Parts = tuple[str, ...]

WHITEOUT = ".wh."
_META = ".wh..wh."
_OPAQUE = ".wh..wh..opq"
OPAQUE_XATTR = "trusted.overlay.opaque"
_CHUNK = 1 << 20
_MAX_HOPS = 40
_MAX_DEPTH = 256
"""Deeper trees make recursion costly for every program after this one."""
_MAX_ID = 0xFFFFFFFE
_DROPPED_XATTRS = ("trusted.overlay.", "user.overlay.", "security.selinux")
"""overlayfs's own, which would change what other files are; labels of another host's policy."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one layer may hold."""

    entries: int
    size_bytes: int


def split_name(name: str) -> Parts:
    """The components of an entry's name, below the root; a leading slash counts for nothing.

    Raises:
        InvalidRequest: it climbs out by `..` or holds a NUL.
    """
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts or "\0" in name:
        raise InvalidRequest(f"the archive has an entry named {_show(name)}")
    return parts


def _show(name: str) -> str:
    """A name for a message: short, printable."""
    return ascii(name if len(name) <= 200 else name[:200] + "...")


def xattrs_of(headers: Mapping[str, str]) -> dict[str, bytes]:
    """The extended attributes among an entry's pax headers, without those never taken over.

    Raises:
        InvalidRequest: one is not encoded as it should be.
    """
    found: dict[str, bytes] = {}
    for key, value in headers.items():
        raw = value.encode("utf-8", "surrogateescape")
        if key.startswith("SCHILY.xattr."):
            found[key.removeprefix("SCHILY.xattr.")] = raw
        elif key.startswith("LIBARCHIVE.xattr."):
            found.setdefault(unquote(key.removeprefix("LIBARCHIVE.xattr.")), _base64(raw))
    return {name: value for name, value in found.items() if not name.startswith(_DROPPED_XATTRS)}


def _base64(raw: bytes) -> bytes:
    try:
        return base64.b64decode(raw + b"=" * (-len(raw) % 4))
    except ValueError as error:
        raise InvalidRequest(f"an extended attribute is not base64: {error}") from error


def mtime_ns_of(member: tarfile.TarInfo) -> int:
    """An entry's mtime in nanoseconds, exact where pax gives it so.

    Raises:
        InvalidRequest: it is no time.
    """
    written = member.pax_headers.get("mtime")
    try:
        nanoseconds = int(Decimal(written or member.mtime) * 1_000_000_000)
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{_show(member.name)} has the mtime {written!r}") from error
    return max(-(2**62), min(nanoseconds, 2**62))


def _mode(path: str) -> int | None:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


class TreeWriter:
    """Writes one layer under `new`, looking at the merged layers below it in `lower`."""

    def __init__(self, new: str, lower: str | None, limits: Limits) -> None:
        self.entries = 0
        self.size_bytes = 0
        self.dropped_xattrs = 0
        self.leans_on_lower = False
        self._new_root = new
        self._lower_root = lower
        self._limits = limits
        self._resolved: dict[Parts, Parts] = {(): ()}
        self._lower_dirs: dict[Parts, bool] = {(): lower is not None}
        self._implied: set[Parts] = set()
        self._times: dict[Parts, int] = {(): 0}
        self._whiteouts: dict[Parts, None] = {}
        self._opaque: dict[Parts, None] = {}

    @property
    def self_contained(self) -> bool:
        """Whether the result is right over any layers."""
        return not self.leans_on_lower and not self._implied

    def add(self, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        """Write one entry.

        Args:
            member: its header.
            content: the bytes of a regular file.

        Raises:
            InvalidRequest: the entry makes no sense.
            PayloadTooLarge: the layer exceeds its limits.
            OSError: the file system refused.
        """
        self._count(member)
        parts = split_name(member.name)
        if not parts:
            self._add_root(member)
        elif parts[-1].startswith(WHITEOUT):
            self._add_whiteout(parts)
        else:
            at = (*self._directory(parts[:-1]), parts[-1])
            if len(at) > _MAX_DEPTH:
                raise InvalidRequest(f"the archive has directories {len(at)} deep")
            self._make(member, at, content)

    def finish(self) -> None:
        """Write what can only be written last: whiteouts, opaque marks, times of directories.

        Raises:
            OSError: the file system refused.
        """
        for at in self._whiteouts:
            self._finish_whiteout(at)
        for at in self._opaque:
            self._finish_opaque(at)
        for at, mtime_ns in self._times.items():
            if self._is_new_dir(at):
                os.utime(self._new(at), ns=(mtime_ns, mtime_ns))

    # -- where things are ---------------------------------------------------------------------

    def _new(self, at: Parts) -> str:
        return "/".join((self._new_root, *at))

    def _lower(self, at: Parts) -> str:
        return "/".join((self._lower_root or "", *at))

    def _is_new_dir(self, at: Parts) -> bool:
        mode = _mode(self._new(at))
        return mode is not None and stat.S_ISDIR(mode)

    def _lower_mode(self, at: Parts) -> int | None:
        """The mode of what lies below at a place, unless this layer hides it."""
        if at in self._whiteouts or not self._lower_dir(at[:-1]):
            return None
        return _mode(self._lower(at))

    def _lower_dir(self, at: Parts) -> bool:
        """Whether the layers below have a directory there that shows through this layer."""
        if at in self._opaque:
            return False
        if at not in self._lower_dirs:
            mode = self._lower_mode(at)
            self._lower_dirs[at] = mode is not None and stat.S_ISDIR(mode)
        return self._lower_dirs[at]

    def _directory(self, parts: Parts) -> Parts:
        """Where a directory named in the tar really is, made if need be."""
        if parts not in self._resolved:
            self._resolved[parts] = self._walk(parts)
        return self._resolved[parts]

    def _walk(self, parts: Parts) -> Parts:
        pending, hops = list(reversed(parts)), 0
        at: Parts = ()
        while pending:
            name = pending.pop()
            if name in ("", ".", ".."):
                at = at[:-1] if name == ".." else at
                continue
            target = self._step((*at, name))
            if target is None:
                at = (*at, name)
                continue
            hops += 1
            if hops > _MAX_HOPS:
                raise InvalidRequest(f"too many symbolic links in {_show('/'.join(parts))}")
            at = () if target.startswith("/") else at
            pending.extend(reversed(target.split("/")))
        return at

    def _step(self, at: Parts) -> str | None:
        """One step of the walk: the target of a symbolic link, or None for a directory."""
        mode = _mode(self._new(at))
        if mode is None:
            return self._step_below(at)
        if stat.S_ISLNK(mode):
            return os.readlink(self._new(at))
        if not stat.S_ISDIR(mode):
            raise InvalidRequest(
                f"the archive puts a file into {_show('/'.join(at))}, not a directory"
            )
        return None

    def _step_below(self, at: Parts) -> str | None:
        below = self._lower_mode(at)
        if below is not None and stat.S_ISLNK(below):
            self.leans_on_lower = True
            return os.readlink(self._lower(at))
        if len(at) > _MAX_DEPTH:
            raise InvalidRequest(f"the archive has directories {len(at)} deep")
        os.mkdir(self._new(at), 0o755)
        self._implied.add(at)
        self._times[at] = 0
        if below is not None and stat.S_ISDIR(below):
            self._copy_metadata(at)
        return None

    # -- entries ------------------------------------------------------------------------------

    def _count(self, member: tarfile.TarInfo) -> None:
        self.entries += 1
        if self.entries > self._limits.entries:
            raise PayloadTooLarge(f"the layer has more than {self._limits.entries} entries")
        if member.isreg():
            self._charge(member.size)

    def _charge(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        if size_bytes < 0 or self.size_bytes > self._limits.size_bytes:
            raise PayloadTooLarge(f"the layer holds more than {self._limits.size_bytes} bytes")

    def _add_root(self, member: tarfile.TarInfo) -> None:
        if member.isdir():
            self._set_metadata(member, ())
            self._times[()] = mtime_ns_of(member)

    def _add_whiteout(self, parts: Parts) -> None:
        hidden = parts[-1].removeprefix(WHITEOUT)
        if parts[-1] == _OPAQUE:
            self._opaque[self._directory(parts[:-1])] = None
            return
        if parts[-1].startswith(_META):
            return  # AUFS's own book-keeping
        if hidden in ("", ".", ".."):
            raise InvalidRequest(f"the archive has a whiteout named {_show(parts[-1])}")
        self._whiteouts[(*self._directory(parts[:-1]), hidden)] = None

    def _make(self, member: tarfile.TarInfo, at: Parts, content: IO[bytes] | None) -> None:
        if member.islnk():
            self._make_link(member, at)
            return
        if member.isdir():
            self._make_directory(member, at)
            return
        self._clear(at)
        if member.isreg():
            self._make_file(member, at, content)
        elif member.issym():
            self._make_symlink(member, at)
        elif member.isfifo():
            os.mkfifo(self._new(at), 0o600)
        elif member.isdev():
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            device = os.makedev(member.devmajor, member.devminor)
            os.mknod(self._new(at), kind | 0o600, device)
        else:
            raise InvalidRequest(f"{_show(member.name)} is of the unknown type {member.type!r}")
        self._set_metadata(member, at)

    def _make_directory(self, member: tarfile.TarInfo, at: Parts) -> None:
        if not self._is_new_dir(at):
            self._clear(at)
            os.mkdir(self._new(at), 0o700)
        self._implied.discard(at)
        self._set_metadata(member, at)
        self._times[at] = mtime_ns_of(member)

    def _make_file(self, member: tarfile.TarInfo, at: Parts, content: IO[bytes] | None) -> None:
        if content is None:
            raise InvalidRequest(f"{_show(member.name)} has no content")
        self._write(at, content, sparse=member.issparse())

    def _write(self, at: Parts, content: IO[bytes], *, sparse: bool = False) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._new(at), flags, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            while chunk := content.read(_CHUNK):
                if sparse and not any(chunk):
                    file.seek(len(chunk), os.SEEK_CUR)
                else:
                    _write_all(file.fileno(), chunk)
            return file.truncate(file.tell())

    def _make_symlink(self, member: tarfile.TarInfo, at: Parts) -> None:
        if not member.linkname or "\0" in member.linkname:
            raise InvalidRequest(f"{_show(member.name)} is a symbolic link to nothing")
        os.symlink(member.linkname, self._new(at))

    def _make_link(self, member: tarfile.TarInfo, at: Parts) -> None:
        named = split_name(member.linkname)
        if not named:
            raise InvalidRequest(f"{_show(member.name)} is a hard link to a directory")
        target = (*self._directory(named[:-1]), named[-1])
        if target == at:
            return
        mode = _mode(self._new(target))
        if mode is None:
            mode = self._copy_up(target, member)
        if stat.S_ISDIR(mode):
            raise InvalidRequest(f"{_show(member.name)} is a hard link to a directory")
        if target[: len(at)] == at:
            raise InvalidRequest(f"{_show(member.name)} is a hard link to something in itself")
        self._clear(at)
        os.link(self._new(target), self._new(at), follow_symlinks=False)

    def _clear(self, at: Parts) -> None:
        """Remove what an earlier entry put there."""
        path = self._new(at)
        mode = _mode(path)
        if mode is None:
            return
        if stat.S_ISDIR(mode):
            shutil.rmtree(path)
            self._implied = {p for p in self._implied if p[: len(at)] != at}
            self._times = {p: t for p, t in self._times.items() if p[: len(at)] != at}
        else:
            os.unlink(path)
        self._resolved = {(): ()}

    # -- what lies below ----------------------------------------------------------------------

    def _copy_up(self, at: Parts, member: tarfile.TarInfo) -> int:
        """Bring a file of the layers below into this one, to link to it; its mode."""
        mode = self._lower_mode(at)
        if mode is None:
            raise InvalidRequest(
                f"{_show(member.name)} is a hard link to {_show(member.linkname)}, which is nowhere"
            )
        self.leans_on_lower = True
        lower, new = self._lower(at), self._new(at)
        if stat.S_ISREG(mode):
            self._charge(os.lstat(lower).st_size)
            with open(lower, "rb") as content:
                self._write(at, content)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(lower), new)
        elif not stat.S_ISDIR(mode):
            os.mknod(new, mode, os.lstat(lower).st_rdev)
        if not stat.S_ISDIR(mode):
            self._copy_metadata(at)
        return mode

    def _copy_metadata(self, at: Parts) -> None:
        lower, new = self._lower(at), self._new(at)
        status = os.lstat(lower)
        os.chown(new, status.st_uid, status.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            os.chmod(new, stat.S_IMODE(status.st_mode))
        for name in os.listxattr(lower, follow_symlinks=False):
            if not name.startswith(_DROPPED_XATTRS):
                self._set_xattr(new, name, os.getxattr(lower, name, follow_symlinks=False))
        times = (status.st_mtime_ns, status.st_mtime_ns)
        os.utime(new, ns=times, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            self._times[at] = status.st_mtime_ns

    # -- metadata -----------------------------------------------------------------------------

    def _set_metadata(self, member: tarfile.TarInfo, at: Parts) -> None:
        """Owner first: changing it clears the set-user-id bit and the file's capabilities."""
        path = self._new(at)
        if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
            raise InvalidRequest(f"{_show(member.name)} belongs to {member.uid}:{member.gid}")
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            os.chmod(path, stat.S_IMODE(member.mode))
        for name, value in xattrs_of(member.pax_headers).items():
            self._set_xattr(path, name, value)
        mtime_ns = mtime_ns_of(member)
        os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)

    def _set_xattr(self, path: str, name: str, value: bytes) -> None:
        try:
            os.setxattr(path, name, value, follow_symlinks=False)
        except OSError as error:
            # A full xattr block is ENOSPC too, and is not a full disk.
            if error.errno in (errno.ENOSPC, errno.E2BIG, errno.ERANGE):
                raise InvalidRequest(f"the xattr {name!r} is too large: {len(value)} B") from error
            if error.errno not in (errno.EOPNOTSUPP, errno.EPERM):
                raise
            self.dropped_xattrs += 1

    # -- what hides ---------------------------------------------------------------------------

    def _finish_whiteout(self, at: Parts) -> None:
        """A whiteout hides what is below, never what this layer has itself."""
        if not self._is_new_dir(at[:-1]):
            return
        if self._is_new_dir(at):
            os.setxattr(self._new(at), OPAQUE_XATTR, b"y")
        elif _mode(self._new(at)) is None:
            os.mknod(self._new(at), stat.S_IFCHR, os.makedev(0, 0))
            os.utime(self._new(at), ns=(0, 0))

    def _finish_opaque(self, at: Parts) -> None:
        if not at:
            self._hide_lower_root()
        elif self._is_new_dir(at):
            os.setxattr(self._new(at), OPAQUE_XATTR, b"y")

    def _hide_lower_root(self) -> None:
        """An opaque root is ignored by overlayfs: hide each name below instead."""
        self.leans_on_lower = True
        if self._lower_root is not None:
            for name in os.listdir(self._lower_root):
                self._finish_whiteout((name,))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
