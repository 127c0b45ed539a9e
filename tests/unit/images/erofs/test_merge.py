"""Merging against a model that knows layers only as sets of paths."""

from __future__ import annotations

import random
import stat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.images.erofs.merge import merge
from dsec.images.erofs.tree import BLOCK, HOLE, OPAQUE_XATTR, Device, Extent, Inode, Tree
from tests.unit.images.erofs.trees import RANDOM, Described, RandomTrees, describe

NAMES = [b"a", b"b", b"c", b"d"]
DEVICES = [Device(f"sha256:{n:064x}", 100 * BLOCK) for n in range(4)]
FILE = stat.S_IFREG | 0o644


def make_layers(rng: random.Random, count: int) -> list[Tree]:
    maker = RandomTrees(rng, NAMES, overlay=True)
    return [maker.make(rng.sample(DEVICES, rng.randint(0, 3))) for _ in range(count)]


def lay_over(below: Described, layer: Tree, number: int) -> None:
    """Apply one layer to the files seen so far, as one would unpack it."""
    described = describe(layer, overlay_xattrs=False)
    for path, inode in layer.walk():
        if path and (inode.is_opaque or not inode.is_dir or not stat.S_ISDIR(mode_at(below, path))):
            for gone in [p for p in below if p == path or p.startswith(path + b"/")]:
                del below[gone]
        if not inode.is_whiteout:
            *values, first = described[path]
            below[path] = (*values, (number, first))


def mode_at(described: Described, path: bytes) -> int:
    return int(described[path][0]) if path in described else 0


def model(layers: list[Tree]) -> Described:
    seen: Described = {}
    for number, layer in enumerate(layers):
        lay_over(seen, layer, number)
    return with_least_names(seen)


def with_least_names(seen: Described) -> Described:
    names: dict[tuple[int, bytes], bytes] = {}
    for path in sorted(seen, key=lambda path: path.split(b"/")):
        names.setdefault(seen[path][-1], path)
    return {path: (*values[:-1], names[values[-1]]) for path, values in seen.items()}


@settings(max_examples=120, deadline=None)
@given(RANDOM, st.integers(1, 4))
def test_merged_layers_show_what_the_model_shows(rng: random.Random, count: int) -> None:
    layers = make_layers(rng, count)
    merged = merge(layers, keep_whiteouts=False)
    assert describe(merged) == model(layers)


@settings(max_examples=120, deadline=None)
@given(RANDOM, st.integers(1, 3), st.integers(1, 2))
def test_merged_layers_do_to_others_what_they_did_apart(
    rng: random.Random, above: int, below: int
) -> None:
    layers = make_layers(rng, above + below)
    merged = merge(layers[below:], keep_whiteouts=True)
    together = merge([*layers[:below], merged], keep_whiteouts=False)
    assert describe(together) == model(layers)


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_layers_are_not_changed_nor_shared(rng: random.Random) -> None:
    layers = make_layers(rng, 3)
    before = [describe(layer) for layer in layers]
    for keep in (True, False):
        merged = merge(layers, keep_whiteouts=keep)
        for _, inode in merged.walk():
            inode.mode = 0
            inode.xattrs[b"user.new"] = b""
            inode.extents.append(Extent(HOLE, 0, 1))
            inode.children.clear()
    assert [describe(layer) for layer in layers] == before


@settings(max_examples=60, deadline=None)
@given(RANDOM)
def test_devices_are_those_of_all_layers_once(rng: random.Random) -> None:
    layers = make_layers(rng, 3)
    devices = merge(layers, keep_whiteouts=True).devices
    assert devices == list(dict.fromkeys(d for layer in layers for d in layer.devices))


def tree(**children: Inode) -> Tree:
    return Tree(directory(False, **children))


def directory(opaque: bool = False, **children: Inode) -> Inode:
    xattrs = {OPAQUE_XATTR: b"y"} if opaque else {}
    named = {name.encode(): inode for name, inode in children.items()}
    return Inode(stat.S_IFDIR | 0o755, xattrs=xattrs, children=named)


def whiteout() -> Inode:
    return Inode(stat.S_IFCHR)


def test_links_stay_links_when_one_name_is_replaced() -> None:
    shared = Inode(FILE)
    below = tree(a=shared, b=shared, c=shared)
    root = merge([below, tree(a=Inode(FILE))], keep_whiteouts=False).root
    assert root.children[b"b"] is root.children[b"c"]
    assert root.children[b"a"] is not root.children[b"b"]


def test_a_directory_that_hid_something_stays_opaque() -> None:
    for hidden in (whiteout(), Inode(FILE), directory(opaque=True)):
        merged = merge([tree(d=hidden), tree(d=directory())], keep_whiteouts=True)
        assert merged.root.children[b"d"].is_opaque


def test_a_directory_that_hid_nothing_is_not_opaque() -> None:
    layers = [tree(), tree(d=directory()), tree(d=directory())]
    assert not merge(layers, keep_whiteouts=True).root.children[b"d"].is_opaque


def test_whiteouts_are_kept_where_they_have_an_effect() -> None:
    layers = [tree(d=directory(x=whiteout())), tree(gone=whiteout(), d=directory())]
    root = merge(layers, keep_whiteouts=True).root
    assert root.children[b"gone"].is_whiteout
    assert root.children[b"d"].children[b"x"].is_whiteout
    hiding = merge([*layers, tree(d=directory(opaque=True, y=whiteout()))], keep_whiteouts=True)
    assert hiding.root.children[b"d"].children == {}


def test_an_opaque_directory_does_not_show_through_one_laid_over_it() -> None:
    bottom = tree(d=directory(old=Inode(FILE)))
    layers = [bottom, tree(d=directory(opaque=True, new=Inode(FILE))), tree(d=directory())]
    merged = merge(layers, keep_whiteouts=False)
    assert list(merged.root.children[b"d"].children) == [b"new"]
    assert not merged.root.children[b"d"].is_opaque


def test_deep_layers() -> None:
    deep = tree()
    inode = deep.root
    for _ in range(3000):
        inode.children[b"d"] = inode = directory()
    assert describe(merge([deep, deep], keep_whiteouts=True)) == describe(deep)


# -- links to files of lower trees ---------------------------------------------------------------


def file(device: int = 0, **fields: Any) -> Inode:
    return Inode(FILE, size=BLOCK, mtime_ns=7, extents=[Extent(device, 3, 1)], **fields)


def over(devices: list[int], **children: Inode) -> Tree:
    made = tree(**children)
    made.devices = [DEVICES[number] for number in devices]
    return made


def groups(root: Inode) -> list[list[bytes]]:
    """Names of each inode."""
    found: dict[Inode, list[bytes]] = {}
    for name, inode in sorted(root.children.items()):
        found.setdefault(inode, []).append(name)
    return list(found.values())


@pytest.mark.parametrize("keep", [True, False])
def test_a_link_to_a_file_below_is_that_file(keep: bool) -> None:
    old, copy, again = file(), file(device=1), file(device=0)
    layers = [
        over([0], a=old, b=old),
        over([2, 0], b=copy, c=copy),
        over([0], c=again, d=again),
    ]
    root = merge(layers, keep_whiteouts=keep).root
    assert groups(root) == [[b"a", b"b", b"c", b"d"]]
    assert root.children[b"d"].extents == [Extent(0, 3, 1)]


def test_a_link_is_found_though_the_name_it_was_made_from_has_gone() -> None:
    old, copy = file(), file()
    layers = [over([0], a=old, b=old), over([0], b=copy, c=copy), tree(b=whiteout())]
    assert groups(merge(layers, keep_whiteouts=False).root) == [[b"a", b"c"]]


def test_a_link_to_a_file_of_which_no_other_name_is_left() -> None:
    old, copy = file(), file()
    layers = [over([0], a=old), over([0], a=copy, c=copy), tree(a=Inode(FILE))]
    assert groups(merge(layers, keep_whiteouts=False).root) == [[b"a"], [b"c"]]


@pytest.mark.parametrize(
    "changed",
    [{"uid": 1}, {"mtime_ns": 8}, {"xattrs": {b"user.a": b""}}, {"mode": FILE | 0o111}],
)
def test_what_differs_is_another_file(changed: dict[str, Any]) -> None:
    old, other = file(), file()
    for name, value in changed.items():
        setattr(other, name, value)
    layers = [over([0], a=old, b=old), over([0], a=other, c=other)]
    assert groups(merge(layers, keep_whiteouts=False).root) == [[b"a", b"c"], [b"b"]]


def test_equal_content_is_no_link() -> None:
    """Of two layers with the same data, each name is a file of its own."""
    layers = [over([0], a=file()), over([0], b=file())]
    assert groups(merge(layers, keep_whiteouts=False).root) == [[b"a"], [b"b"]]


def test_two_equal_files_below_are_told_apart() -> None:
    copy = file()
    layers = [over([0], a=file(), b=file()), over([0], b=copy, c=copy)]
    assert groups(merge(layers, keep_whiteouts=False).root) == [[b"a"], [b"b", b"c"]]
