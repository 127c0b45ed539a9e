"""What a tar's entry says of its file: checked, and in the kernel's terms.

What the kernel would refuse is refused here, so that an image holds nothing that overlayfs cannot
copy into a sandbox's own layer later.
"""

from __future__ import annotations

import base64
import os
import stat
import tarfile
from collections.abc import Mapping
from decimal import Decimal
from urllib.parse import unquote_to_bytes

from dsec.base.errors import InvalidRequest
from dsec.images.erofs.tree import Inode

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095
_MAX_ID = 0xFFFFFFFE
_MAX_MTIME_NS = 2**62
_MAX_XATTR_BYTES = 60_000
"""Names and values of one inode; the kernel lists at most 64 KiB and the image holds no more."""
_NEVER = (b"trusted.overlay.", b"user.overlay.", b"security.selinux")
"""overlayfs's own, which would change what other files are; labels of another host's policy."""
_NAMESPACES = (b"user.", b"trusted.", b"security.")
_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")
_KINDS = {
    **dict.fromkeys(tarfile.REGULAR_TYPES, stat.S_IFREG),
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
}


def show(name: str | bytes) -> str:
    """A name for a message: short, printable."""
    text = os.fsdecode(name)
    return ascii(text if len(text) <= 200 else text[:200] + "...")


def split_name(name: str) -> tuple[bytes, ...]:
    """The components of an entry's name, below the root; a leading slash counts for nothing.

    Raises:
        InvalidRequest: it climbs out by `..` or holds a NUL.
    """
    raw = name.encode("utf-8", "surrogateescape")
    parts = tuple([part for part in raw.split(b"/") if part not in (b"", b".")])
    if b".." in parts or b"\0" in raw:
        raise InvalidRequest(f"the archive has an entry named {show(name)}")
    return parts


def inode_of(member: tarfile.TarInfo) -> Inode:
    """The inode an entry describes, without content; `keep_xattrs` gives it its xattrs.

    Raises:
        InvalidRequest: a field makes no sense, or the entry is of no kind known.
    """
    kind = _KINDS.get(member.type)
    if kind is None:
        raise InvalidRequest(f"{show(member.name)} is of the unknown type {member.type!r}")
    if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
        raise InvalidRequest(f"{show(member.name)} belongs to {member.uid}:{member.gid}")
    inode = Inode(
        mode=kind | (0o777 if kind == stat.S_IFLNK else stat.S_IMODE(member.mode)),
        uid=member.uid,
        gid=member.gid,
        mtime_ns=mtime_ns_of(member),
    )
    if kind == stat.S_IFLNK:
        inode.target = _target(member)
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        inode.rdev = _device(member)
    return inode


def _target(member: tarfile.TarInfo) -> bytes:
    target = member.linkname.encode("utf-8", "surrogateescape")
    if not target or b"\0" in target:
        raise InvalidRequest(f"{show(member.name)} is a symbolic link to nothing")
    if len(target) > MAX_PATH_BYTES:
        raise InvalidRequest(f"{show(member.name)} is a symbolic link of {len(target)} bytes")
    return target


def _device(member: tarfile.TarInfo) -> int:
    major, minor = member.devmajor, member.devminor
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise InvalidRequest(f"{show(member.name)} is the device {major}:{minor}")
    return os.makedev(major, minor)


def mtime_ns_of(member: tarfile.TarInfo) -> int:
    """An entry's mtime in nanoseconds, exact where pax gives it so.

    Raises:
        InvalidRequest: it is no time.
    """
    written = member.pax_headers.get("mtime")
    if written is None and isinstance(member.mtime, int):
        return max(-_MAX_MTIME_NS, min(member.mtime * 1_000_000_000, _MAX_MTIME_NS))
    try:
        seconds = Decimal(member.mtime if written is None else written)
    except (ArithmeticError, ValueError) as error:
        raise InvalidRequest(f"{show(member.name)} has the mtime {written!r}") from error
    if not seconds.is_finite():
        raise InvalidRequest(f"{show(member.name)} has the mtime {written!r}")
    most = Decimal(_MAX_MTIME_NS) / 1_000_000_000
    return int(max(-most, min(seconds, most)) * 1_000_000_000)  # clamped first: 1e999999 is a time


# -- extended attributes ---------------------------------------------------------------------------


def xattrs_of(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """The extended attributes among an entry's pax headers, without those never taken over.

    Raises:
        InvalidRequest: one is not encoded as it should be.
    """
    found: dict[bytes, bytes] = {}
    for key, value in headers.items():
        if key.startswith("SCHILY.xattr."):
            name = key.removeprefix("SCHILY.xattr.").encode("utf-8", "surrogateescape")
            found[name] = value.encode("utf-8", "surrogateescape")
        elif key.startswith("LIBARCHIVE.xattr."):
            name = unquote_to_bytes(key.removeprefix("LIBARCHIVE.xattr."))
            found.setdefault(name, _base64(value))
    return {name: value for name, value in found.items() if not name.startswith(_NEVER)}


def _base64(value: str) -> bytes:
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4))
    except ValueError as error:
        raise InvalidRequest(f"an extended attribute is not base64: {error}") from error


def inherited_xattrs(inode: Inode) -> dict[bytes, bytes]:
    """Those of a file of a lower layer that its copy in this one has too."""
    return {n: value for n, value in inode.xattrs.items() if not n.startswith(_NEVER)}


def keep_xattrs(inode: Inode, wanted: Mapping[bytes, bytes]) -> int:
    """Give an inode its xattrs; those its kind or the kernel cannot have are dropped.

    Returns:
        How many were dropped.

    Raises:
        InvalidRequest: one is malformed, or they are too large.
    """
    inode.xattrs = {name: wanted[name] for name in wanted if _can_have(inode.mode, name)}
    for name, value in inode.xattrs.items():
        _check_xattr(name, value)
    size = sum(len(name) + len(value) for name, value in inode.xattrs.items())
    if size > _MAX_XATTR_BYTES:
        raise InvalidRequest(f"the xattrs of an entry are too large: {size} B")
    return len(wanted) - len(inode.xattrs)


def _can_have(mode: int, name: bytes) -> bool:
    if name.startswith(b"user."):
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    if name in _ACLS:
        return stat.S_ISDIR(mode) or (name == _ACLS[0] and not stat.S_ISLNK(mode))
    return name.startswith(_NAMESPACES)


def _check_xattr(name: bytes, value: bytes) -> None:
    if len(name) > MAX_NAME_BYTES or b"\0" in name or name in _NAMESPACES:
        raise InvalidRequest(f"an entry has an xattr named {show(name)}")
    if name == b"security.capability" and not _is_capability(value):
        raise InvalidRequest("an entry's security.capability is none")
    if name in _ACLS and not _is_acl(value):
        raise InvalidRequest(f"an entry's {name.decode()} is none")


def _is_capability(value: bytes) -> bool:
    """Whether it is of version 2 or 3; the kernel takes no other any more."""
    return (len(value), value[3:4]) in ((20, b"\x02"), (24, b"\x03"))


def _is_acl(value: bytes) -> bool:
    return value[:4] == b"\x02\x00\x00\x00" and len(value) % 8 == 4
