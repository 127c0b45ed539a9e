"""A directory on disk, as an ordinary user may have it."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.base.errors import InvalidRequest
from dsec.images.erofs import scan as scanning
from dsec.images.erofs.data import DataWriter
from dsec.images.erofs.scan import scan
from dsec.images.erofs.tree import HOLE, Inode, Tree
from tests.unit.images.erofs.trees import describe_content, describe_directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def scanned(root: Path) -> tuple[Tree, bytes]:
    """The tree with its device, and the data."""
    path = root.parent / "data"
    with DataWriter(path) as data:
        tree = scan(root, data)
        device = data.finish()
    tree.devices = [device] if device else []
    content = path.read_bytes()
    path.unlink()
    return tree, content


def assert_equal(root: Path) -> Tree:
    tree, content = scanned(root)
    data = {device.digest: content for device in tree.devices}
    assert describe_content(tree, data) == describe_directory(os.fsencode(root))
    return tree


def test_all_kinds_of_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "empty").touch()
    (root / "small").write_bytes(b"content")
    (root / "large").write_bytes(os.urandom(300_000))
    (root / "dir/inner").mkdir(parents=True)
    (root / "dir/inner/file").write_bytes(b"content")
    (root / "dir/link").symlink_to("/etc/passwd")
    (root / "dangling").symlink_to("t" * 4095)
    os.mkfifo(root / "fifo", 0o640)
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    (root / "small").chmod(0o4751)
    (root / "dir").chmod(0o1770)
    os.setxattr(root / "small", "user.note", b"kept")
    os.setxattr(root / "dir", "user.note", b"kept too")
    for path in (root / "small", root / "dir/link", root / "dir"):
        os.utime(path, ns=(1, 1_700_000_000_123_456_789), follow_symlinks=False)
    tree = assert_equal(root)
    small, other = tree.root.children[b"small"], tree.root.children[b"dir"].children[b"inner"]
    assert small.extents == other.children[b"file"].extents


def test_odd_names(root: Path) -> None:
    for byte in set(range(1, 256)) - set(b"/."):
        (root / os.fsdecode(bytes([byte]))).touch()
    (root / ("n" * 255)).mkdir()
    tree = assert_equal(root)
    assert len(tree.root.children) == 254


def test_hard_links(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "dir/first").write_bytes(b"x")
    os.link(root / "dir/first", root / "second")
    (root / "target").symlink_to("x")
    os.link(root / "target", root / "same", follow_symlinks=False)
    tree = assert_equal(root)
    assert tree.root.children[b"second"] is tree.root.children[b"dir"].children[b"first"]


def test_holes(root: Path) -> None:
    with (root / "sparse").open("wb") as file:
        file.truncate(6 << 30)
        file.seek(1 << 30)
        file.write(b"middle")
        file.seek((5 << 30) + 77)
        file.write(os.urandom(200_000))
    tree, content = scanned(root)
    sparse = tree.root.children[b"sparse"]
    assert [e.device for e in sparse.extents] == [HOLE, 0, HOLE, 0, HOLE]
    assert len(content) < 1 << 20
    at = sparse.extents[0].blocks * 4096
    assert at == 1 << 30
    assert content[:6] == b"middle"


def test_the_data_does_not_depend_on_the_order_on_disk(root: Path) -> None:
    names = [f"{n:03d}" for n in range(50)]
    for name in names:
        (root / name).write_text(name)
    _, first = scanned(root)
    for name in names:
        (root / name).unlink()
    for name in reversed(names):
        (root / name).write_text(name)
    _, second = scanned(root)
    assert first == second


def test_deep_directories(root: Path) -> None:
    path = root
    for _ in range(256):
        path /= "d"
        path.mkdir()
    tree, _ = scanned(root)
    assert len(list(tree.walk())) == 257
    (path / "d").mkdir()
    with pytest.raises(InvalidRequest, match="nested deeper than 256"):
        scanned(root)


def test_a_root_that_is_a_link_is_not_followed(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    with pytest.raises(NotADirectoryError):
        scanned(root.parent / "link")


def replace_by_link(path: Path, target: Path) -> None:
    path.rename(path.with_name("moved away"))
    path.symlink_to(target)


CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "a directory becomes a link out": lambda root, out: replace_by_link(root / "dir", out),
    "a file becomes a link out": lambda root, out: replace_by_link(root / "file", out / "secret"),
    "a file becomes a fifo": lambda root, _: replace_by_fifo(root / "file"),
    "a file becomes a directory": lambda root, _: replace_by_directory(root / "file"),
    "a file goes": lambda root, _: (root / "file").unlink(),
    "a directory goes": lambda root, _: (root / "dir").rmdir(),
    "a file shrinks": lambda root, _: os.truncate(root / "file", 1),
}


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("case", CHANGES)
def test_what_changes_meanwhile_leads_nowhere(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The change comes at the worst moment: after the look at a name, before it is opened."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"not yours")
    (root / "dir").mkdir()
    (root / "file").write_bytes(b"as it was")
    original = scanning._Scan._read_file
    real_fstat = os.fstat
    done: list[str] = []

    def change() -> None:
        if not done:
            done.append(case)
            CHANGES[case](root, outside)

    def read_file(self: scanning._Scan, directory: int, name: str, status: os.stat_result) -> Inode:
        if case != "a file shrinks":
            change()
        return original(self, directory, name, status)

    def fstat(descriptor: int) -> os.stat_result:
        status = real_fstat(descriptor)
        if case == "a file shrinks" and stat.S_ISREG(status.st_mode) and status.st_size == 9:
            change()
        return status

    monkeypatch.setattr(scanning._Scan, "_read_file", read_file)
    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(InvalidRequest):
        scanned(root)
    assert done
    assert b"not yours" not in (root.parent / "data").read_bytes()


def test_no_descriptor_is_left_open(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "dir/file").touch()
    before = sorted(Path("/proc/self/fd").iterdir())
    scanned(root)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
