"""Differences packed: the same bytes however they were read, and nothing else in them."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.base.errors import InvalidRequest, PayloadTooLarge
from dsec.images import upper as reading
from dsec.images.erofs import scan
from dsec.images.erofs.read import read_image
from dsec.images.erofs.scan import fill
from dsec.images.erofs.tree import OPAQUE_XATTR, Inode
from dsec.images.oci.layer import Limits
from dsec.images.packer import Packed, Packer
from dsec.images.residue import Sieve
from dsec.images.upper import Upper, own_xattrs

LIMITS = Limits(entries=10_000, size_bytes=64 << 20)
Change = Callable[[Path], None]


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    root = tmp_path / "upper"
    (root / "b/inner").mkdir(parents=True)
    (root / "a").write_bytes(b"small")
    (root / "z").write_bytes(os.urandom(200_000))
    (root / "b/same").write_bytes(b"small")
    (root / "b/inner/secret").write_bytes(b"SECRET" * 1000)
    (root / "b/inner/link").symlink_to("/etc/passwd")
    with (root / "sparse").open("wb") as file:
        file.truncate(5 << 20)
        os.pwrite(file.fileno(), b"end", 4 << 20)
    os.link(root / "a", root / "b/again")
    return root


def packed(
    upper: Path, *, look: bool = True, change: Change | None = None, exclude: tuple[str, ...] = ()
) -> tuple[Packed, bytes]:
    """The result, and the data."""
    out = upper.parent / f"out-{len(list(upper.parent.iterdir()))}"
    out.mkdir()
    with Packer(out, upper, Sieve(clean=True, exclude=exclude), LIMITS) as packer:
        if look:
            packer.look()
        if change is not None:
            change(upper)
        packer.take()
        done = packer.finish()
    assert sorted(path.name for path in out.iterdir()) == ["data", "meta.erofs"]
    return done, (out / "data").read_bytes()


def rewrite(root: Path) -> None:
    """Change a file, and then its times and size back to what they were."""
    status = (root / "b/inner/secret").stat()
    (root / "b/inner/secret").write_bytes(b"PUBLIC" * 1000)
    os.utime(root / "b/inner/secret", ns=(status.st_atime_ns, status.st_mtime_ns))


def delete(root: Path) -> None:
    (root / "b/inner/secret").unlink()


def add_before(root: Path) -> None:
    (root / "A").write_bytes(os.urandom(100_000))
    (root / "b/0").write_bytes(b"first")


def grow(root: Path) -> None:
    with (root / "z").open("ab") as file:
        file.write(b"more")


def move(root: Path) -> None:
    (root / "b/inner").rename(root / "elsewhere")


def replace(root: Path) -> None:
    """A directory becomes a link to one outside, a file a pipe."""
    shutil.rmtree(root / "b/inner")
    (root / "b/inner").symlink_to("/etc")
    (root / "z").unlink()
    os.mkfifo(root / "z")


CHANGES: tuple[Change, ...] = (rewrite, delete, add_before, grow, move, replace)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_between_the_passes_leave_no_trace(upper: Path, change: Change) -> None:
    twice, data = packed(upper, change=change)
    once, expected = packed(upper, look=False)
    assert twice == once
    assert data == expected
    assert (b"SECRET" in data) == (b"SECRET" in expected)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_while_a_directory_is_read_are_passed_over(
    upper: Path, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come when its names are known and nothing of it is read."""
    listed = reading._names
    pending = [change]

    def list_and_change(directory: int, most: int) -> list[str]:
        names = listed(directory, most)
        if pending:
            pending.pop()(upper)
        return names

    with monkeypatch.context() as patch:
        patch.setattr(reading, "_names", list_and_change)
        twice, data = packed(upper)
    assert not pending
    assert (twice, data) == packed(upper, look=False)


@pytest.mark.parametrize("change", [delete, replace], ids=lambda change: change.__name__)
def test_what_should_stand_still_and_does_not_is_told(
    upper: Path, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = reading._names
    calls = iter(range(100))

    def list_and_change(directory: int, most: int) -> list[str]:
        names = listed(directory, most)
        if next(calls) == 2:  # of b/inner
            change(upper)
        return names

    monkeypatch.setattr(reading, "_names", list_and_change)
    with pytest.raises(InvalidRequest, match="changed while it was read"):
        packed(upper, look=False)


def test_what_did_not_change_is_not_read_again(
    upper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_tick_ns", lambda: 1 << 62)  # all changes are long ago
    out = upper.parent / "out"
    out.mkdir()
    with Packer(out, upper, Sieve(clean=True), LIMITS) as packer:
        packer.look()
        (upper / "a").chmod(0o600)
        packer.take()
        assert packer._taken is not None
        assert packer._taken.read_bytes == len(b"small")
        packer.finish()


def test_what_changed_in_the_same_tick_is_read_again(
    upper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_tick_ns", lambda: 0)
    with Upper(upper, Sieve(clean=True), LIMITS) as found:
        found.read(still=False)
        assert found._known == {}


def test_what_somebody_has_open_to_write_is_read_when_it_stands_still(
    upper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_tick_ns", lambda: 1 << 62)  # all changes are long ago
    out = upper.parent / "out"
    out.mkdir()
    with Packer(out, upper, Sieve(clean=True), LIMITS) as packer:
        with (upper / "z").open("r+b"):
            packer.look()
        packer.take()
        assert packer._taken is not None
        assert packer._taken.read_bytes == 200_000
        packer.finish()


def test_a_store_into_a_mapping_that_ends_before_it_stands_still_is_packed(
    upper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is dirty when it is looked at: the second store leaves no trace in times."""
    monkeypatch.setattr(reading, "_tick_ns", lambda: 1 << 62)
    out = upper.parent / "out"
    out.mkdir()
    with Packer(out, upper, Sieve(clean=True), LIMITS) as packer:
        with (upper / "z").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[:3] = b"old"
            before = (upper / "z").stat()
            packer.look()
            memory[:3] = b"new"
            assert (upper / "z").stat() == before
        packer.take()
        packer.finish()
    assert (upper / "z").read_bytes() in (out / "data").read_bytes()


def test_what_is_mapped_to_be_read_is_read_once(
    upper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_tick_ns", lambda: 1 << 62)
    out = upper.parent / "out"
    out.mkdir()
    with (upper / "z").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        with Packer(out, upper, Sieve(clean=True), LIMITS) as packer:
            packer.look()
            packer.take()
            assert packer._taken is not None
            assert packer._taken.read_bytes == 0


def test_a_name_that_is_a_link_and_then_a_file_is_passed_over(
    upper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = upper / "b/inner/link"
    filled, pending = scan.fill, [link]

    def fill_and_replace(inode: Inode, status: os.stat_result, where: int | str) -> None:
        filled(inode, status, where)
        if stat.S_ISLNK(status.st_mode) and pending:
            pending.pop().unlink()
            link.write_bytes(b"file")

    monkeypatch.setattr(scan, "fill", fill_and_replace)
    with Upper(upper, Sieve(clean=True), LIMITS) as found:
        names = found.read(still=False).tree.root.children[b"b"].children[b"inner"].children
        assert b"link" not in names or not names[b"link"].target
        assert stat.S_ISREG(
            found.read(still=True)
            .tree.root.children[b"b"]
            .children[b"inner"]
            .children[b"link"]
            .mode
        )
    assert not pending


def test_a_file_that_goes_on_changing_counts_once(upper: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (upper / "sparse").unlink()
    with Packer(tmp_path / "out", upper, Sieve(clean=True), Limits(100, 300_000)) as packer:
        for _ in range(3):
            packer.look()
            (upper / "z").write_bytes(os.urandom(200_000))
        packer.take()
        packer.finish()


def test_of_a_large_directory_no_more_names_are_read_than_allowed(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        assert [len(reading._names(directory, most)) for most in (3, 19, 20, 30)] == [4, 20, 20, 20]
    finally:
        os.close(directory)


def test_what_is_left_out_is_not_in_the_data(upper: Path) -> None:
    done, data = packed(upper, exclude=("/b/inner/**",))
    assert b"SECRET" not in data
    assert done.left_out == 2


def test_deletions_and_hiding_directories_outlive_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "upper"
    (root / "tmp/hiding/inner").mkdir(parents=True)
    (root / "tmp/hiding/inner/file").write_text("gone")
    hiding = (root / "tmp/hiding").stat().st_ino

    def filled(inode: Inode, status: os.stat_result, where: int | str) -> None:
        fill(inode, status, where)
        if status.st_ino == hiding:  # only root may set it
            inode.xattrs[OPAQUE_XATTR] = b"y"

    monkeypatch.setattr(reading, "fill", filled)
    with Upper(root, Sieve(clean=True), LIMITS) as found:
        result = found.read(still=True)
    (kept,) = result.tree.root.children[b"tmp"].children.items()
    assert (kept[0], kept[1].is_opaque, kept[1].children) == (b"hiding", True, {})
    assert result.left_out == 2


def test_xattrs_of_the_overlay_itself_do_not_leak() -> None:
    found = {
        b"user.note": b"1",
        b"user.overlay.opaque": b"y",
        b"security.capability": b"2",
        b"security.selinux": b"3",
        b"system.posix_acl_access": b"4",
        b"trusted.overlay.opaque": b"y",
        b"trusted.overlay.origin": b"5",
        b"trusted.overlay.impure": b"y",
        b"trusted.overlay.overlay.opaque": b"y",
        b"trusted.other": b"6",
    }
    kept = own_xattrs(found, is_directory=True)
    assert sorted(kept) == [
        b"security.capability",
        b"system.posix_acl_access",
        b"trusted.overlay.opaque",
        b"trusted.overlay.overlay.opaque",
        b"user.note",
        b"user.overlay.opaque",
    ]
    assert OPAQUE_XATTR not in own_xattrs(found, is_directory=False)
    assert own_xattrs({OPAQUE_XATTR: b"x"}, is_directory=True) == {}
    for name in (b"trusted.overlay.metacopy", b"trusted.overlay.redirect"):
        with pytest.raises(InvalidRequest):
            own_xattrs({name: b""}, is_directory=False)


def test_limits_hold_in_both_passes(upper: Path, tmp_path: Path) -> None:
    for number, limits in enumerate([Limits(3, 1 << 30), Limits(1000, 100_000)]):
        for look in (True, False):
            out = tmp_path / f"limited-{number}-{look}"
            out.mkdir()
            with Packer(out, upper, Sieve(clean=True), limits) as packer:
                with pytest.raises(PayloadTooLarge):
                    packer.look() if look else packer.take()


def test_an_empty_difference_is_a_layer(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    (tmp_path / "out").mkdir()
    with Packer(tmp_path / "out", tmp_path / "upper", Sieve(clean=True), LIMITS) as packer:
        packer.look()
        packer.take()
        done = packer.finish()
    assert (done.converted.entries, done.converted.own_data) == (0, "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["meta.erofs"]
    root = read_image(tmp_path / "out/meta.erofs").root
    assert stat.S_ISDIR(root.mode)
    assert root.children == {}
