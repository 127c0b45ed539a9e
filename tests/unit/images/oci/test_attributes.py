from __future__ import annotations

import tarfile

import pytest

from dsec.base.errors import InvalidRequest
from dsec.images.erofs.tree import Inode
from dsec.images.oci.attributes import keep_xattrs, mtime_ns_of, split_name, xattrs_of

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
ACL = bytes.fromhex("0200000001000600ffffffff04000400ffffffff20000400ffffffff")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("./", ()),
        ("/", ()),
        ("a", (b"a",)),
        ("/a//b/./c/", (b"a", b"b", b"c")),
        ("./...", (b"...",)),
        ("a/\udcff", (b"a", b"\xff")),
    ],
)
def test_names(name: str, parts: tuple[bytes, ...]) -> None:
    assert split_name(name) == parts


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "/..", "a/..", "a\0b"])
def test_hostile_names(name: str) -> None:
    with pytest.raises(InvalidRequest):
        split_name(name)


def test_xattrs() -> None:
    headers = {
        "SCHILY.xattr.user.a": "1\udcff",
        "LIBARCHIVE.xattr.user.b%20%ff": "AAE",
        "LIBARCHIVE.xattr.user.a": "AAE",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "LIBARCHIVE.xattr.trusted.overlay%2Eredirect": "eA==",
        "SCHILY.xattr.security.selinux": "label",
        "mtime": "1",
    }
    assert xattrs_of(headers) == {b"user.a": b"1\xff", b"user.b \xff": b"\x00\x01"}


@pytest.mark.parametrize(
    ("mode", "name", "value", "kept"),
    [
        (0o100644, b"user.a", b"", True),
        (0o040755, b"user.a", b"1", True),
        (0o120777, b"user.a", b"1", False),
        (0o020600, b"user.a", b"1", False),
        (0o120777, b"trusted.a", b"1", True),
        (0o100644, b"security.capability", CAPABILITY, True),
        (0o100644, b"system.posix_acl_access", ACL, True),
        (0o100644, b"system.posix_acl_default", ACL, False),
        (0o040755, b"system.posix_acl_default", ACL, True),
        (0o120777, b"system.posix_acl_access", ACL, False),
        (0o100644, b"system.nfs4_acl", b"1", False),
        (0o100644, b"lustre.lov", b"1", False),
    ],
)
def test_what_a_kind_of_file_can_have(mode: int, name: bytes, value: bytes, kept: bool) -> None:
    inode = Inode(mode)
    assert keep_xattrs(inode, {name: value}) == (0 if kept else 1)
    assert inode.xattrs == ({name: value} if kept else {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"user.", b"1"),
        (b"user." + b"n" * 251, b"1"),
        (b"user.a\0b", b"1"),
        (b"user.a", b"1" * 60_000),
        (b"security.capability", CAPABILITY[:12]),
        (b"security.capability", CAPABILITY + b"1234"),
        (b"system.posix_acl_access", ACL + b"1"),
        (b"system.posix_acl_access", b""),
    ],
)
def test_xattrs_the_kernel_would_not_take(name: bytes, value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        keep_xattrs(Inode(0o100644), {name: value})


@pytest.mark.parametrize(
    ("written", "nanoseconds"),
    [
        ("1234567890.123456789", 1_234_567_890_123_456_789),
        ("-1.5", -1_500_000_000),
        ("1e-9", 1),
        ("1e999999", 2**62),
        ("-1e99999999999", -(2**62)),
        ("1e-99999999999", 0),
    ],
)
def test_mtimes_are_exact(written: str, nanoseconds: int) -> None:
    info = tarfile.TarInfo("a")
    info.pax_headers = {"mtime": written}
    assert mtime_ns_of(info) == nanoseconds


@pytest.mark.parametrize("written", ["Infinity", "-inf", "nan", "sNaN", "", "yesterday"])
def test_what_is_no_mtime(written: str) -> None:
    info = tarfile.TarInfo("a")
    info.pax_headers = {"mtime": written}
    with pytest.raises(InvalidRequest):
        mtime_ns_of(info)


def test_a_header_without_pax_has_whole_seconds() -> None:
    info = tarfile.TarInfo("a")
    info.mtime = -3
    assert mtime_ns_of(info) == -3 * 10**9
    info.mtime = 1 << 90
    assert mtime_ns_of(info) == 2**62
