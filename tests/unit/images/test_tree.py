"""Entries of a layer into a directory; as any user, so no owners and no devices."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dsec.base.errors import InvalidRequest, PayloadTooLarge
from dsec.images.oci.tree import Limits, TreeWriter, mtime_ns_of, split_name, xattrs_of

ROOMY = Limits(entries=1000, size_bytes=1 << 20)


class Layer:
    """A writer, and entries for it."""

    def __init__(self, place: Path, limits: Limits = ROOMY) -> None:
        self.new, self.lower = place / "new", place / "lower"
        for directory in (self.new, self.lower):
            directory.mkdir()
        self.writer = TreeWriter(str(self.new), str(self.lower), limits)

    def add(self, name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> Layer:
        info = tarfile.TarInfo(name)
        info.type, info.uid, info.gid, info.mtime = kind, os.getuid(), os.getgid(), 1_000_000_000
        info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
        content = fields.pop("content", b"")
        info.size = len(content)
        for key, value in fields.items():
            setattr(info, key, value)
        self.writer.add(info, io.BytesIO(content) if info.isreg() else None)
        return self

    def dirs(self, *names: str) -> Layer:
        for name in names:
            self.add(name, tarfile.DIRTYPE)
        return self

    def symlink(self, name: str, target: str) -> Layer:
        return self.add(name, tarfile.SYMTYPE, linkname=target)

    def link(self, name: str, target: str) -> Layer:
        return self.add(name, tarfile.LNKTYPE, linkname=target)


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    return Layer(tmp_path)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("./", ()),
        ("/", ()),
        ("a", ("a",)),
        ("/a//b/./c/", ("a", "b", "c")),
        ("./...", ("...",)),
        ("a/\udcff", ("a", "\udcff")),
    ],
)
def test_names(name: str, parts: tuple[str, ...]) -> None:
    assert split_name(name) == parts


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "/..", "a/..", "a\0b"])
def test_hostile_names(name: str) -> None:
    with pytest.raises(InvalidRequest):
        split_name(name)


def test_a_link_as_parent_stays_inside(layer: Layer, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    layer.symlink("abs", str(tmp_path / "out")).symlink("up", "../../../../out")
    layer.add("abs/file", content=b"1").add("up/other", content=b"2")
    assert list((tmp_path / "out").iterdir()) == []
    assert (layer.new / "out/other").read_bytes() == b"2"
    assert (layer.new / str(tmp_path / "out/file").lstrip("/")).read_bytes() == b"1"


def test_a_loop_of_links_is_refused(layer: Layer) -> None:
    layer.symlink("a", "b").symlink("b", "a")
    with pytest.raises(InvalidRequest, match="symbolic links"):
        layer.add("a/x")


def test_nothing_is_written_through_what_exists(layer: Layer, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"good")
    layer.symlink("s", str(victim)).add("s", content=b"evil")
    layer.add("one", content=b"1").link("two", "one").add("two", content=b"2")
    assert victim.read_bytes() == b"good"
    assert (layer.new / "one").read_bytes() == b"1"
    assert not (layer.new / "s").is_symlink()


def test_a_cached_directory_is_forgotten_when_replaced(layer: Layer, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    layer.dirs("d").add("d/x").symlink("d", str(tmp_path / "out")).add("d/y")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_is_no_directory(layer: Layer) -> None:
    layer.add("f")
    with pytest.raises(InvalidRequest, match="not a directory"):
        layer.add("f/x")


@pytest.mark.parametrize("target", ["", ".", "nowhere", "d", "../x"])
def test_hard_links_that_cannot_be(layer: Layer, target: str) -> None:
    layer.dirs("d")
    with pytest.raises(InvalidRequest):
        layer.link("h", target)


def test_a_hard_link_to_itself_is_kept(layer: Layer) -> None:
    layer.add("a", content=b"x").link("a", "./a")
    assert (layer.new / "a").read_bytes() == b"x"


def test_a_hard_link_cannot_swallow_its_target(layer: Layer) -> None:
    layer.dirs("d").add("d/f", content=b"x")
    with pytest.raises(InvalidRequest, match="in itself"):
        layer.link("d", "d/f")


def test_a_hard_link_below_copies_up(layer: Layer) -> None:
    (layer.lower / "old").write_bytes(b"below")
    os.utime(layer.lower / "old", (5, 5))
    layer.link("new", "old")
    layer.writer.finish()
    status = (layer.new / "new").stat()
    assert (status.st_nlink, status.st_mtime, (layer.new / "old").read_bytes()) == (2, 5, b"below")
    assert not layer.writer.self_contained


def test_listed_parents_make_a_layer_self_contained(layer: Layer) -> None:
    (layer.lower / "d").mkdir(mode=0o700)
    layer.add("d/x")
    assert not layer.writer.self_contained
    assert stat.S_IMODE((layer.new / "d").stat().st_mode) == 0o700
    layer.dirs("d")  # listed after what is in it
    assert layer.writer.self_contained


def test_a_link_below_is_followed(layer: Layer) -> None:
    (layer.lower / "usr/lib").mkdir(parents=True)
    (layer.lower / "lib").symlink_to("usr/lib")
    layer.add("lib/x", content=b"1")
    assert (layer.new / "usr/lib/x").read_bytes() == b"1"
    assert not layer.writer.self_contained


def test_what_is_hidden_below_is_not_seen(layer: Layer) -> None:
    (layer.lower / "d").mkdir()
    (layer.lower / "d/l").symlink_to("elsewhere")
    (layer.lower / "s").symlink_to("elsewhere")
    layer.add(".wh.s").dirs("d").add("d/.wh..wh..opq").add("d/l/x").add("s/x")
    assert not (layer.new / "elsewhere").exists()


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh..."])
def test_whiteouts_of_nothing(layer: Layer, name: str) -> None:
    with pytest.raises(InvalidRequest):
        layer.add(name)


def test_book_keeping_of_aufs_is_ignored(layer: Layer) -> None:
    layer.add(".wh..wh.aufs").dirs(".wh..wh.plnk")
    layer.writer.finish()
    assert list(layer.new.iterdir()) == []


def test_a_whiteout_spares_what_its_own_layer_has(layer: Layer) -> None:
    layer.add("f", content=b"mine").add(".wh.f")
    layer.writer.finish()
    assert (layer.new / "f").read_bytes() == b"mine"


def test_times_of_directories_come_last(layer: Layer) -> None:
    layer.dirs("d").add("d/x")
    layer.writer.finish()
    assert (layer.new / "d").stat().st_mtime == 1_000_000_000
    assert layer.new.stat().st_mtime == 0


def test_limits(tmp_path: Path) -> None:
    layer = Layer(tmp_path, Limits(entries=3, size_bytes=10))
    layer.add("a", content=b"12345")
    with pytest.raises(PayloadTooLarge, match="bytes"):
        layer.add("b", content=b"123456")
    layer.dirs("c")
    with pytest.raises(PayloadTooLarge, match="entries"):
        layer.dirs("d")


def test_too_deep(layer: Layer) -> None:
    with pytest.raises(InvalidRequest, match="deep"):
        layer.add("/".join(["d"] * 300))


@pytest.mark.parametrize("fields", [{"uid": -1}, {"gid": 1 << 33}, {"type": b"Z"}])
def test_fields_out_of_range(layer: Layer, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        layer.add("a", **fields)


def test_xattrs() -> None:
    headers = {
        "SCHILY.xattr.user.a": "1\udcff",
        "LIBARCHIVE.xattr.user.b%20c": "AAE",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.selinux": "label",
        "mtime": "1",
    }
    assert xattrs_of(headers) == {"user.a": b"1\xff", "user.b c": b"\x00\x01"}


def test_mtimes_are_exact() -> None:
    info = tarfile.TarInfo("a")
    info.pax_headers = {"mtime": "1234567890.123456789"}
    assert mtime_ns_of(info) == 1_234_567_890_123_456_789
    info.pax_headers = {"mtime": "Infinity"}
    with pytest.raises(InvalidRequest):
        mtime_ns_of(info)
