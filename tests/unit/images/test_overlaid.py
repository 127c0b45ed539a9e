from __future__ import annotations

import stat

import pytest

from dsec.images.erofs.tree import OPAQUE_XATTR, Inode, Tree
from dsec.images.overlaid import Overlaid, Part, overlay

Sketch = dict[str, "Sketch | str"]
"""A directory; a text is a file's, `-` a whiteout; the name `!` makes it opaque."""


def tree(sketch: Sketch) -> Inode:
    root = Inode(stat.S_IFDIR | 0o755)
    for name, what in sketch.items():
        if name == "!":
            root.xattrs[OPAQUE_XATTR] = b"y"
        elif isinstance(what, dict):
            root.children[name.encode()] = tree(what)
        elif what == "-":
            root.children[name.encode()] = Inode(stat.S_IFCHR)
        else:
            root.children[name.encode()] = Inode(stat.S_IFREG | 0o644, target=what.encode())
    return root


def laid(*sketches: Sketch) -> Overlaid:
    return overlay([Part(f"p{n}", Tree(tree(s))) for n, s in enumerate(sketches)])


def seen(over: Overlaid) -> dict[str, int]:
    return {path.decode(): entry.part for path, entry in over.entries.items()}


def hidden(over: Overlaid) -> list[tuple[str, int, int]]:
    return [(h.path.decode(), h.lower.part, h.upper.part) for h in over.hidden]


def test_directories_are_merged_and_files_replaced() -> None:
    over = laid({"d": {"a": "0", "b": "0"}}, {"d": {"b": "1", "c": "1"}})
    assert seen(over) == {"/": 1, "/d": 1, "/d/a": 0, "/d/b": 1, "/d/c": 1}
    assert list(over.entries) == sorted(over.entries)
    assert hidden(over) == [("/d/b", 0, 1)]
    assert [source.part for source in over.entries[b"/d"].under] == [0]


def test_whiteouts_delete_and_are_not_seen() -> None:
    over = laid({"d": {"a": "0"}, "f": "0"}, {"d": "-", "f": "-", "none": "-"})
    assert seen(over) == {"/": 1}
    assert sorted(hidden(over)) == [("/d", 0, 1), ("/f", 0, 1)]


def test_what_was_deleted_may_come_again() -> None:
    over = laid({"f": "0"}, {"f": "-"}, {"f": "2"})
    assert seen(over) == {"/": 2, "/f": 2}
    assert hidden(over) == [("/f", 0, 2)]


def test_opaque_directories_hide_what_is_below() -> None:
    over = laid({"d": {"a": "0"}}, {"d": {"!": "", "b": "1"}}, {"d": {"c": "2"}})
    assert seen(over) == {"/": 2, "/d": 2, "/d/b": 1, "/d/c": 2}
    assert hidden(over) == [("/d", 0, 1)]


def test_files_and_directories_replace_each_other() -> None:
    over = laid({"a": {"x": "0"}, "b": "0"}, {"a": "1", "b": {"y": "1"}})
    assert seen(over) == {"/": 1, "/a": 1, "/b": 1, "/b/y": 1}
    over = laid({"a": {"x": "0"}}, {"a": "1"}, {"a": {"z": "2"}})
    assert seen(over) == {"/": 2, "/a": 2, "/a/z": 2}
    assert hidden(over) == [("/a", 1, 2), ("/a", 0, 2)]


def test_depth_is_no_matter() -> None:
    root = Inode(stat.S_IFDIR)
    at = root
    for _ in range(3000):
        at.children[b"d"] = at = Inode(stat.S_IFDIR)
    assert len(overlay([Part("p", Tree(root))]).entries) == 3001


def test_no_parts() -> None:
    with pytest.raises(ValueError, match="at least one"):
        overlay([])
