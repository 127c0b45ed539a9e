"""A converted tar, mounted, against what GNU tar makes of it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.images.converting import convert_directory, convert_tar
from dsec.images.oci.layer import Limits
from dsec.images.oci.source import Blob
from dsec.images.store.interface import nothing
from dsec.linux import mounts

pytestmark = [pytest.mark.anyio, pytest.mark.needs_root]

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
ROOMY = Limits(1_000_000, 8 << 30)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "mnt"
    target.mkdir()
    yield target
    if mounts.is_mounted(target):
        mounts.umount(target)


def fill(root: Path) -> Path:
    """Everything a tree may hold, over some thousand real files."""
    root.mkdir(mode=0o751)
    shutil.copytree(Path(os.__file__).parent / "email", root / "email", symlinks=True)
    shutil.copytree(Path(os.__file__).parent / "encodings", root / "enc", symlinks=True)
    (root / "many").mkdir()
    for number in range(1500):
        (root / f"many/{number}").write_bytes(b"%d" % number * (number % 70))
    for name in (b"caf\xe9-\xff", b"new\nline", "snow\u2603".encode(), b"n" * 255, b" ", b"\\a\t"):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(name)
    deep = root / "/".join(["deep" * 10] * 20)
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"deep")
    for kind, device in (
        (stat.S_IFCHR, (1, 3)),
        (stat.S_IFBLK, (259, 300)),
        (stat.S_IFIFO, (0, 0)),
    ):
        os.mknod(root / f"node{kind}", kind | 0o640, os.makedev(*device))
    (root / "link").symlink_to("/nowhere/at/all")
    (root / "long-link").symlink_to("x/" * 2000)
    (root / "suid").write_bytes(b"s" * 5000)
    (root / "suid").chmod(0o6755)
    os.link(root / "suid", root / "many/suid-too")
    os.link(root / "link", root / "link-too", follow_symlinks=False)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "owned").write_bytes(b"o")
    os.chown(root / "owned", 3_000_000_000, 65534)
    with (root / "sparse").open("wb") as file:
        file.seek(700_001)
        file.write(b"middle")
        file.truncate(5_000_000)
    (root / "hole").touch()
    os.truncate(root / "hole", 300_000)
    (root / "big").write_bytes(os.urandom(3_000_001))
    for xattr, value in (("user.note", b"\0\xff bin"), ("trusted.mine", b"1"), ("user.e", b"")):
        os.setxattr(root / "big", xattr, value)
    os.setxattr(root / "suid", "security.capability", CAPABILITY)
    os.setxattr(root / "tmp", "user.dir", b"d" * 1000)
    os.setxattr(root / "link", "trusted.link", b"l", follow_symlinks=False)
    for number, path in enumerate(sorted(root.rglob("*"))):
        times = (0, (number - 50) * 86_400 * 10**9 + number * 1001)
        os.utime(path, ns=times, follow_symlinks=False)
    os.utime(root, ns=(0, 1_234_567_890_123_456_789))
    return root


def run(*argv: str | Path) -> None:
    subprocess.run(argv, check=True)


def describe(path: Path) -> dict[str, Any]:
    status = path.lstat()
    kind = stat.S_IFMT(status.st_mode)
    return {
        "mode": oct(status.st_mode),
        "owner": (status.st_uid, status.st_gid),
        "mtime": status.st_mtime_ns,
        "rdev": status.st_rdev,
        "nlink": status.st_nlink if kind != stat.S_IFDIR else None,
        "target": str(path.readlink()) if kind == stat.S_IFLNK else None,
        "content": path.read_bytes() if kind == stat.S_IFREG else None,
        "xattrs": {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
        },
    }


def inventory(root: Path) -> dict[str, dict[str, Any]]:
    return {str(path.relative_to(root)): describe(path) for path in [root, *root.rglob("*")]}


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = inventory(found), inventory(expected)
    assert sorted(ours) == sorted(theirs)
    assert len(ours) > 1600
    for name in ours:
        assert ours[name] == theirs[name], name


XATTRS = ["--xattrs", "--xattrs-include=*"]


@pytest.mark.parametrize("form", ["pax", "gnu", "pax-sparse", "gnu-sparse"])
async def test_a_tar_is_what_gnu_tar_unpacks(tmp_path: Path, mount_point: Path, form: str) -> None:
    tree = fill(tmp_path / "tree")
    flavour, _, sparse = form.partition("-")
    flags = [
        f"--format={flavour}",
        *(["-S"] if sparse else []),
        *(XATTRS if flavour == "pax" else []),
    ]
    blob, out, expected = tmp_path / "t.tar", tmp_path / "out", tmp_path / "expected"
    run("tar", *flags, "-C", tree, "-cf", blob, ".")
    expected.mkdir()
    run("tar", *XATTRS, "--same-owner", "-C", expected, "-xpf", blob)
    out.mkdir()
    size = blob.stat().st_size
    converted = await convert_tar(out, Blob(blob, 0, size), [], ROOMY, nothing, need_end=True)
    mounts.mount_erofs(out / "meta.erofs", mount_point, [out / "data"])
    assert_same(mount_point, expected)
    assert converted.self_contained
    assert converted.dropped_xattrs == 0


async def test_a_directory_is_itself(tmp_path: Path, mount_point: Path) -> None:
    tree, out = fill(tmp_path / "tree"), tmp_path / "out"
    out.mkdir()
    first = await convert_directory(out, tree, ROOMY, nothing)
    mounts.mount_erofs(out / "meta.erofs", mount_point, [out / "data"])
    assert_same(mount_point, tree)
    copy, again = tmp_path / "copy", tmp_path / "again"
    run("cp", "-a", tree, copy)
    again.mkdir()
    assert await convert_directory(again, copy, ROOMY, nothing) == first
