"""Entries of a layer into a tree: what each becomes, and what no entry can do."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.base.errors import InvalidRequest, PayloadTooLarge
from dsec.images.erofs.data import DataWriter
from dsec.images.erofs.tree import BLOCK, OPAQUE_XATTR, Inode, Tree
from dsec.images.oci.layer import LayerBuilder, Limits

ROOMY = Limits(entries=1000, size_bytes=1 << 20)


class Layer:
    """A builder, entries for it, and a look at what came of them."""

    def __init__(self, place: Path, below: Layer | None = None, limits: Limits = ROOMY) -> None:
        place.mkdir(exist_ok=True)
        self.looked = 0
        self._below = below
        self._path = place / "data"
        self.data = DataWriter(self._path)
        self.builder = LayerBuilder(self._look, self.data, limits)
        self._tree: Tree | None = None

    def _look(self) -> Tree | None:
        self.looked += 1
        return self._below.tree if self._below is not None else None

    def add(self, name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> Layer:
        info = tarfile.TarInfo(name)
        info.type, info.mtime = kind, 1_000_000_000
        info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
        content = fields.pop("content", b"")
        info.size = len(content)
        for key, value in fields.items():
            setattr(info, key, value)
        self.builder.add(info, io.BytesIO(content) if info.isreg() else None)
        return self

    def dirs(self, *names: str, **fields: Any) -> Layer:
        for name in names:
            self.add(name, tarfile.DIRTYPE, **fields)
        return self

    def symlink(self, name: str, target: str) -> Layer:
        return self.add(name, tarfile.SYMTYPE, linkname=target)

    def link(self, name: str, target: str) -> Layer:
        return self.add(name, tarfile.LNKTYPE, linkname=target)

    @property
    def tree(self) -> Tree:
        """The finished layer."""
        if self._tree is None:
            self._tree = self.builder.finish()
        return self._tree

    def at(self, path: str) -> Inode:
        """The inode of that name; KeyError if there is none."""
        inode = self.tree.root
        for part in path.encode().split(b"/"):
            inode = inode.children[part]
        return inode

    def read(self, path: str) -> bytes:
        """A file's content, if it lies in this layer's own data or is a hole."""
        inode = self.at(path)
        data = b""
        for extent in inode.extents:
            assert extent.device in (-1, 0)
            start = extent.block * BLOCK
            stored = self._path.read_bytes()[start : start + extent.blocks * BLOCK]
            data += bytes(extent.blocks * BLOCK) if extent.device < 0 else stored
        return data[: inode.size]

    def names(self) -> list[str]:
        return [path.decode() for path, _ in self.tree.walk() if path]


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[Layer]:
    layer = Layer(tmp_path / "layer")
    with layer.data:
        yield layer


@pytest.fixture
def below(tmp_path: Path) -> Iterator[Layer]:
    below = Layer(tmp_path / "below")
    with below.data:
        yield below


@pytest.fixture
def upper(tmp_path: Path, below: Layer) -> Iterator[Layer]:
    """A layer over `below`, which is filled before anybody looks."""
    upper = Layer(tmp_path / "upper", below)
    with upper.data:
        yield upper


# -- what entries become -----------------------------------------------------------------------


def test_a_file_is_what_its_entry_says(layer: Layer) -> None:
    layer.add("f", content=b"abc", mode=0o104755, uid=3_000_000_000, gid=7, mtime=5)
    inode = layer.at("f")
    assert (oct(inode.mode), inode.uid, inode.gid) == ("0o104755", 3_000_000_000, 7)
    assert (inode.mtime_ns, inode.size, layer.read("f")) == (5 * 10**9, 3, b"abc")


def test_every_kind(layer: Layer) -> None:
    layer.symlink("s", "some/where").add("p", tarfile.FIFOTYPE, mode=0o622)
    layer.add("c", tarfile.CHRTYPE, devmajor=1, devminor=3).add("e")
    layer.add("b", tarfile.BLKTYPE, devmajor=259, devminor=300).dirs("d", mode=0o1777)
    assert (oct(layer.at("s").mode), layer.at("s").target) == ("0o120777", b"some/where")
    assert oct(layer.at("p").mode) == "0o10622"
    assert stat.S_ISCHR(layer.at("c").mode)
    assert layer.at("c").rdev == os.makedev(1, 3)
    assert stat.S_ISBLK(layer.at("b").mode)
    assert layer.at("b").rdev == os.makedev(259, 300)
    assert oct(layer.at("d").mode) == "0o41777"
    assert (layer.at("e").size, layer.at("e").extents) == (0, [])
    assert layer.tree.devices == []


def test_a_later_entry_replaces_an_earlier_one(layer: Layer) -> None:
    layer.add("f", content=b"first, and longer").add("f", content=b"second")
    layer.dirs("d").add("d/x").add("d", content=b"a file").dirs("f").add("f/y")
    assert layer.read("d") == b"a file"
    assert layer.names() == ["d", "f", "f/y"]


def test_a_directory_listed_again_keeps_what_is_in_it(layer: Layer) -> None:
    layer.dirs("d", pax_headers={"SCHILY.xattr.user.old": "1"}).add("d/x", content=b"1")
    layer.dirs("d", mode=0o700, uid=9, pax_headers={"SCHILY.xattr.user.new": "2"})
    assert layer.read("d/x") == b"1"
    assert (oct(layer.at("d").mode), layer.at("d").uid) == ("0o40700", 9)
    assert layer.at("d").xattrs == {b"user.new": b"2"}


def test_hard_links_are_one_inode(layer: Layer) -> None:
    layer.add("one", content=b"1").link("two", "./one").symlink("s", "x").link("t", "s")
    assert layer.at("one") is layer.at("two")
    assert layer.at("s") is layer.at("t")


def test_a_link_that_is_replaced_leaves_the_other_name(layer: Layer) -> None:
    layer.add("one", content=b"1").link("two", "one").add("two", content=b"2")
    assert (layer.read("one"), layer.read("two")) == (b"1", b"2")


def test_a_hard_link_to_itself_is_kept(layer: Layer) -> None:
    layer.add("a", content=b"x").link("a", "./a")
    assert layer.read("a") == b"x"


def test_the_root_is_an_entry_too(layer: Layer) -> None:
    assert layer.add("./", tarfile.DIRTYPE, mode=0o700, uid=4).builder.self_contained
    assert (oct(layer.tree.root.mode), layer.tree.root.uid) == ("0o40700", 4)


def test_directories_nobody_lists(layer: Layer) -> None:
    layer.add("a/b/f")
    assert (oct(layer.at("a").mode), layer.at("a").mtime_ns) == ("0o40755", 0)
    assert not layer.builder.self_contained
    assert layer.builder.entries == 3


# -- names that would lead elsewhere -----------------------------------------------------------


def test_a_link_as_parent_stays_inside(layer: Layer) -> None:
    layer.symlink("abs", "/etc/out").symlink("up", "../../../../out/./in//")
    layer.add("abs/file", content=b"1").add("up/other", content=b"2")
    assert layer.read("etc/out/file") == b"1"
    assert layer.read("out/in/other") == b"2"


def test_links_through_links(layer: Layer) -> None:
    layer.dirs("real", "real/deep").symlink("a", "b/deep").symlink("b", "real")
    layer.add("a/x", content=b"1")
    assert layer.read("real/deep/x") == b"1"


def test_a_loop_of_links_is_refused(layer: Layer) -> None:
    layer.symlink("a", "b").symlink("b", "a")
    with pytest.raises(InvalidRequest, match="symbolic links"):
        layer.add("a/x")


def test_a_symlink_that_is_replaced_is_not_followed(layer: Layer) -> None:
    layer.symlink("s", "/etc/passwd").add("s", content=b"evil")
    assert layer.read("s") == b"evil"
    assert layer.names() == ["s"]


def test_a_directory_that_became_a_link_is_followed_anew(layer: Layer) -> None:
    layer.dirs("d", "out").add("d/x").symlink("d", "out").add("d/y", content=b"1")
    assert layer.read("out/y") == b"1"
    assert layer.names() == ["d", "out", "out/y"]


def test_a_file_is_no_directory(layer: Layer) -> None:
    layer.add("f")
    with pytest.raises(InvalidRequest, match="not a directory"):
        layer.add("f/x")


@pytest.mark.parametrize("target", ["", ".", "nowhere", "d", "../x", "d/../x"])
def test_hard_links_that_cannot_be(layer: Layer, target: str) -> None:
    layer.dirs("d")
    with pytest.raises(InvalidRequest):
        layer.link("h", target)


@pytest.mark.parametrize("place", ["d", "d/e"])
def test_a_hard_link_cannot_swallow_its_target(layer: Layer, place: str) -> None:
    layer.dirs("d", "d/e").add("d/e/f", content=b"x")
    with pytest.raises(InvalidRequest, match="in itself"):
        layer.link(place, "d/e/f")


def test_names_no_kernel_takes(layer: Layer) -> None:
    layer.add("n" * 255)
    for name in ("n" * 256, "/".join(["p" * 250] * 17), ".wh." + "n" * 256):
        with pytest.raises(InvalidRequest, match="long"):
            layer.add(name)
    with pytest.raises(InvalidRequest, match="4096 bytes"):
        layer.symlink("s", "t" * 4096)


def test_too_deep(layer: Layer) -> None:
    layer.dirs("/".join(["d"] * 256))
    with pytest.raises(InvalidRequest, match="257 deep"):
        layer.add("/".join(["d"] * 257))


@pytest.mark.parametrize(
    "fields",
    [
        {"uid": -1},
        {"gid": 1 << 33},
        {"type": b"Z"},
        {"type": tarfile.CHRTYPE, "devmajor": 1 << 12},
        {"type": tarfile.BLKTYPE, "devminor": 1 << 20},
        {"type": tarfile.SYMTYPE, "linkname": ""},
        {"type": tarfile.SYMTYPE, "linkname": "a\0b"},
        {"pax_headers": {"mtime": "never"}},
        {"pax_headers": {"SCHILY.xattr.user.": "x"}},
        {"pax_headers": {"SCHILY.xattr.user.big": "x" * 65_000}},
        {"pax_headers": {"SCHILY.xattr.security.capability": "x"}},
        {"pax_headers": {"LIBARCHIVE.xattr.user.a": "\u20ac"}},
    ],
)
def test_fields_that_make_no_sense(layer: Layer, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        layer.add("a", **fields)


# -- what hides --------------------------------------------------------------------------------


def test_whiteouts(upper: Layer) -> None:
    upper.dirs("d").add("d/.wh.x").add(".wh.y")
    assert upper.at("d/x").is_whiteout
    assert upper.at("y").is_whiteout
    assert upper.builder.self_contained
    assert upper.looked == 0


def test_an_opaque_directory(upper: Layer) -> None:
    upper.dirs("d").add("d/.wh..wh..opq").add("d/x")
    assert upper.at("d").is_opaque
    assert upper.names() == ["d", "d/x"]


def test_a_whiteout_spares_what_its_own_layer_has(layer: Layer) -> None:
    layer.add("f", content=b"mine").add(".wh.f").add(".wh.d").dirs("d").add("d/x")
    assert layer.read("f") == b"mine"
    assert layer.at("d").is_opaque
    assert layer.names() == ["d", "d/x", "f"]


def test_a_directory_that_was_a_file_hides_what_is_below(layer: Layer) -> None:
    layer.add("d").dirs("d")
    assert layer.at("d").is_opaque


def test_an_opaque_root_hides_each_name_below(upper: Layer, below: Layer) -> None:
    below.add("f").dirs("d", "gone")
    upper.dirs("d").add(".wh..wh..opq")
    assert not upper.builder.self_contained
    assert upper.at("f").is_whiteout
    assert upper.at("gone").is_whiteout
    assert upper.at("d").is_opaque
    assert not upper.tree.root.is_opaque


MARKS = ["f/.wh.x", "f/.wh..wh..opq", "f/d/.wh.x", "f/.wh..wh.plnk"]


@pytest.mark.parametrize("mark", MARKS)
def test_below_a_file_there_is_nothing_to_hide(layer: Layer, mark: str) -> None:
    layer.add("f", content=b"mine").add(mark)
    assert layer.read("f") == b"mine"
    assert layer.names() == ["f"]
    assert layer.builder.self_contained


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.FIFOTYPE, None])
def test_below_a_file_of_a_lower_layer_there_is_nothing_to_hide(
    upper: Layer, below: Layer, mark: str, kind: bytes | None
) -> None:
    below.dirs("other")
    if kind is not None:
        below.add("f", kind)
    upper.add(mark)
    assert upper.names() == []


def test_what_hides_nothing_here_may_hide_something_elsewhere(upper: Layer, below: Layer) -> None:
    below.add("f")
    upper.add("f/.wh.x")
    assert not upper.builder.self_contained


def test_a_directory_that_becomes_a_file_after_its_names_went(upper: Layer, below: Layer) -> None:
    below.dirs("f").add("f/x")
    upper.add("f/.wh.x").add("f", content=b"now")
    assert upper.read("f") == b"now"
    assert upper.names() == ["f"]


def test_a_mark_through_a_link_that_leads_nowhere(upper: Layer, below: Layer) -> None:
    below.symlink("l", "nowhere/at/all")
    upper.add("l/.wh.x").add("l/.wh..wh..opq")
    assert upper.names() == []


def test_what_is_hidden_already_is_hidden_once(upper: Layer, below: Layer) -> None:
    below.dirs("d", "d/e", "o", "o/p")
    upper.add(".wh.d").add("d/.wh.x").add("d/e/.wh.x")
    upper.dirs("o").add("o/.wh..wh..opq").add("o/p/.wh.x")
    assert upper.names() == ["d", "o"]
    assert upper.at("d").is_whiteout


def test_over_layers_that_are_not_known_marks_are_kept(layer: Layer) -> None:
    layer.add("d/.wh.x").add("e/.wh..wh..opq").add(".wh.gone").add("gone/.wh.x")
    assert layer.names() == ["d", "d/x", "e", "gone"]
    assert layer.at("e").is_opaque
    assert layer.at("gone").is_whiteout


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh..."])
def test_whiteouts_of_nothing(layer: Layer, name: str) -> None:
    with pytest.raises(InvalidRequest):
        layer.add(name)


def test_book_keeping_of_aufs_is_ignored(layer: Layer) -> None:
    layer.add(".wh..wh.aufs").dirs(".wh..wh.plnk")
    assert layer.names() == []


def test_marks_of_the_tar_are_dropped(layer: Layer) -> None:
    layer.dirs("d", pax_headers={f"SCHILY.xattr.{OPAQUE_XATTR.decode()}": "y"})
    assert layer.at("d").xattrs == {}
    assert layer.builder.dropped_xattrs == 0


# -- layers below ------------------------------------------------------------------------------


def test_a_hard_link_below_copies_up(upper: Layer, below: Layer) -> None:
    below.add("old", content=b"below", mtime=5, pax_headers={"SCHILY.xattr.user.a": "1"})
    upper.add("own", content=b"own").link("new", "old")
    assert upper.at("new") is upper.at("old")
    assert (upper.at("new").mtime_ns, upper.at("new").xattrs) == (5 * 10**9, {b"user.a": b"1"})
    assert upper.tree.devices == [upper.builder.own_data, *below.tree.devices]
    assert [extent.device for extent in upper.at("new").extents] == [1]
    assert [extent.device for extent in below.at("old").extents] == [0]
    assert not upper.builder.self_contained


def test_a_layer_of_links_alone_has_no_data_of_its_own(upper: Layer, below: Layer) -> None:
    below.add("old", content=b"below").symlink("s", "t")
    upper.link("new", "old").link("s2", "s")
    assert upper.tree.devices == below.tree.devices
    assert upper.builder.own_data is None
    assert upper.at("s2").target == b"t"


def test_data_that_lies_below_too_is_one_device(upper: Layer, below: Layer) -> None:
    below.add("old", content=b"same")
    upper.add("own", content=b"same").link("new", "old")
    assert upper.tree.devices == below.tree.devices
    assert upper.at("new").extents == upper.at("own").extents


@pytest.mark.parametrize("target", ["d", "d/hidden", "gone"])
def test_hard_links_below_that_cannot_be(upper: Layer, below: Layer, target: str) -> None:
    below.dirs("d").add("d/hidden").add("gone")
    upper.add(".wh.gone").dirs("d").add("d/.wh..wh..opq")
    with pytest.raises(InvalidRequest):
        upper.link("h", target)


def test_a_copied_up_file_is_charged(tmp_path: Path, below: Layer) -> None:
    below.add("old", content=b"12345")
    upper = Layer(tmp_path / "small", below, Limits(10, 4))
    with upper.data, pytest.raises(PayloadTooLarge, match="bytes"):
        upper.link("new", "old")


def test_unlisted_parents_are_as_below(upper: Layer, below: Layer) -> None:
    below.dirs("d", mode=0o1777, uid=3, pax_headers={"SCHILY.xattr.user.a": "1"}).add("d/old")
    upper.add("d/x")
    assert not upper.builder.self_contained
    assert (oct(upper.at("d").mode), upper.at("d").uid) == ("0o41777", 3)
    assert upper.at("d").xattrs == {b"user.a": b"1"}
    assert upper.names() == ["d", "d/x"]


def test_listed_parents_make_a_layer_self_contained(upper: Layer, below: Layer) -> None:
    below.dirs("d")
    upper.add("d/x")
    assert not upper.builder.self_contained
    upper.dirs("d")  # listed after what is in it
    assert upper.builder.self_contained


def test_a_link_below_is_followed(upper: Layer, below: Layer) -> None:
    below.dirs("usr", "usr/lib").symlink("lib", "usr/lib").symlink("usr/lib/up", "../..")
    upper.dirs("usr", "usr/lib").add("lib/x", content=b"1").add("lib/up/y", content=b"2")
    assert upper.read("usr/lib/x") == b"1"
    assert upper.read("y") == b"2"
    assert not upper.builder.self_contained


def test_what_is_hidden_below_is_not_seen(upper: Layer, below: Layer) -> None:
    below.dirs("d").symlink("d/l", "/elsewhere").symlink("s", "elsewhere")
    below.symlink("f", "elsewhere").dirs("e").symlink("e/l", "/elsewhere")
    upper.add(".wh.s").dirs("d").add("d/.wh..wh..opq").add("d/l/x").add("s/x")
    upper.add("f").dirs("f").add("f/x").dirs("e").add("e/l2/x").add(".wh.e").add("e/l/x")
    assert "elsewhere" not in upper.names()
    assert {"d/l/x", "s/x", "f/x", "e/l/x"} <= set(upper.names())


def test_a_link_below_is_followed_no_more_once_it_is_hidden(upper: Layer, below: Layer) -> None:
    below.dirs("real").symlink("s", "real")
    upper.add("s/x").add(".wh.s").add("s/y")
    assert upper.names() == ["real", "real/x", "s", "s/y"]


def test_layers_below_are_read_only_if_needed(upper: Layer, below: Layer) -> None:
    below.dirs("d").add("d/old")
    upper.dirs("d", "d/e").add("d/e/x").add("d/.wh.old").link("d/y", "d/e/x").symlink("s", "d")
    upper.add("s/z").add("d/e/.wh..wh..opq")
    assert upper.builder.self_contained
    assert upper.names()
    assert upper.looked == 0


def test_directories_left_to_those_below_are_told(layer: Layer) -> None:
    layer.add("a/b/f").dirs("c").add("c/d/f").add("e/f").dirs("e").add("g/.wh.x")
    assert layer.builder.implied == ["/", "/a", "/a/b", "/c/d", "/g"]
    layer.dirs(".", "a")
    assert layer.builder.implied == ["/a/b", "/c/d", "/g"]


def test_a_directory_that_hides_what_is_below_is_its_own(layer: Layer) -> None:
    layer.dirs(".").add("a/f").add(".wh.a").add(".wh.b").add("b/c/f")
    layer.add("d/e/f").add("d/.wh..wh..opq").add("d/g/f").add("h").dirs("h").add("h/i/f")
    assert layer.builder.implied == ["/d"]  # what is in it is hidden, it is not


def test_a_directory_whose_name_no_record_can_say(layer: Layer) -> None:
    layer.dirs(".").add(os.fsdecode(b"\xff/f"))
    assert layer.builder.implied == []
    assert not layer.builder.self_contained


# -- limits ------------------------------------------------------------------------------------


def test_limits(tmp_path: Path) -> None:
    layer = Layer(tmp_path / "l", limits=Limits(entries=3, size_bytes=10))
    with layer.data:
        layer.add("a", content=b"12345")
        with pytest.raises(PayloadTooLarge, match="bytes"):
            layer.add("b", content=b"123456")
        layer.dirs("c")
        with pytest.raises(PayloadTooLarge, match="entries"):
            layer.dirs("d")


def test_directories_nobody_lists_count_as_entries(tmp_path: Path) -> None:
    layer = Layer(tmp_path / "l", limits=Limits(entries=10, size_bytes=10))
    with layer.data, pytest.raises(PayloadTooLarge, match="entries"):
        layer.dirs("/".join(["d"] * 11))


def test_content_that_ends_early(layer: Layer) -> None:
    with pytest.raises(InvalidRequest, match="early"):
        layer.add("f", content=b"1", size=2)


# -- holes -------------------------------------------------------------------------------------


def test_a_sparse_file_keeps_its_holes(layer: Layer) -> None:
    size = (1 << 18) * 3
    pieces = [(70_000, 3), ((1 << 18) * 2, 5)]
    layer.add("s", content=b"abc12345", size=size, sparse=pieces)
    data = layer.read("s")
    assert (len(data), data[70_000:70_003], data[1 << 19 : (1 << 19) + 5]) == (
        size, b"abc", b"12345",
    )  # fmt: skip
    assert data.count(0) == size - 8
    assert layer.tree.devices[0].size_bytes <= 2 << 16
    assert layer.builder.size_bytes == size


def test_a_huge_hole_is_charged_but_not_written(tmp_path: Path) -> None:
    size = 100 << 30
    layer = Layer(tmp_path / "l", limits=Limits(10, size))
    with layer.data:
        layer.add("s", content=b"end", size=size, sparse=[(size - 3, 3)])
        assert layer.at("s").size == size
        assert layer.tree.devices[0].size_bytes <= 4 << 20
        with pytest.raises(PayloadTooLarge):
            layer.add("more", content=b"1")


@pytest.mark.parametrize(
    "pieces", [[(0, -1)], [(0, 4), (2, 2)], [(4, 4), (0, 2)], [(8, 4)], [(-5, 3)], [(0, 1 << 70)]]
)
def test_maps_that_make_no_sense(layer: Layer, pieces: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidRequest, match="map"):
        layer.add("s", content=bytes(range(20)), size=10, sparse=pieces)
