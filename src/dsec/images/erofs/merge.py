"""Several trees laid over each other into one, by the rules of overlayfs. Pure.

For each name the topmost layer that has it decides. A whiteout there deletes it; a directory there
goes on with the directories of that name in the layers below, down to one that is opaque or to
something that is no directory, which it hides.

A hard link of a layer to a file of one below it came with a copy of that file's inode in its place.
Both are one inode again here, so that all names of the file are links as long as one is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsec.images.erofs.tree import OPAQUE_XATTR, Device, Extent, Inode, Tree

_Stack = list[tuple[int, Inode]]
"""Directories that are one to who looks from above: topmost first, each with its layer."""


def merge(trees: Sequence[Tree], *, keep_whiteouts: bool) -> Tree:
    """One tree that shows what an overlay of all of them shows.

    Args:
        trees: at least one, bottom first; not changed.
        keep_whiteouts: the result still deletes and hides things of layers it is laid over; else
            it has neither whiteouts nor opaque directories.

    Returns:
        The tree. Its devices are those of all trees, each once. Hard links are links, also those
        to a file of a lower tree, unless it has no data of its own.
    """
    return _Merge(trees, keep_whiteouts).run()


class _Merge:
    def __init__(self, trees: Sequence[Tree], keep_whiteouts: bool) -> None:
        self._trees = trees
        self._keep = keep_whiteouts
        self._devices: dict[Device, int] = {}
        self._remaps = [self._add_devices(tree) for tree in trees]
        self._copies: dict[Inode, Inode] = {}
        """Of what is no directory, by the original: so links stay links."""
        self._originals: dict[Inode, Inode] = {}
        """Of inodes that are copies of one in a lower tree."""
        for layer in range(1, len(trees)):
            self._find_originals(layer)

    def _add_devices(self, tree: Tree) -> list[int]:
        """Where the devices of a tree are in the result."""
        known = self._devices
        return [known.setdefault(device, len(known)) for device in tree.devices]

    def _find_originals(self, layer: int) -> None:
        """Find what a tree has of the files below. Few trees share data, the others are not read."""
        tree = self._trees[layer]
        below = {device for lower in self._trees[:layer] for device in lower.devices}
        borrowed = {number for number, device in enumerate(tree.devices) if device in below}
        for path, inode in tree.walk() if borrowed else ():
            if any(extent.device in borrowed for extent in inode.extents):
                self._find_original(layer, path, inode)

    def _find_original(self, layer: int, path: bytes, inode: Inode) -> None:
        """The copy lies where the original does: what is equal elsewhere is a file of its own."""
        for lower in reversed(range(layer)):
            found = _look(self._trees[lower], path)
            if found is not None and self._facts(lower, found) == self._facts(layer, inode):
                self._originals[inode] = self._originals.get(found, found)
                return

    def _facts(self, layer: int, inode: Inode) -> tuple[object, ...]:
        extents = [_moved(extent, self._remaps[layer]) for extent in inode.extents]
        attributes = (inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.xattrs)
        return (*attributes, inode.size, extents)

    def run(self) -> Tree:
        """Merge from the roots down; overlayfs merges all roots, whatever they are marked."""
        stack = [(layer, tree.root) for layer, tree in enumerate(self._trees)][::-1]
        root = _bare(stack[0][1])
        pending = [(root, stack)]
        while pending:
            directory, stack = pending.pop()
            pending += self._fill(directory, stack)
        return Tree(root, list(self._devices))

    def _fill(self, directory: Inode, stack: _Stack) -> list[tuple[Inode, _Stack]]:
        """Give a directory its names; returns the directories among them, still empty."""
        below: list[tuple[Inode, _Stack]] = []
        for name in _names(stack):
            layer, inode = next((n, d.children[name]) for n, d in stack if name in d.children)
            if inode.is_dir:
                merged, parts = self._open(name, stack)
                directory.children[name] = merged
                below.append((merged, parts))
            elif not inode.is_whiteout or (self._keep and not directory.is_opaque):
                directory.children[name] = self._copy(layer, inode)
        return below

    def _open(self, name: bytes, stack: _Stack) -> tuple[Inode, _Stack]:
        """A directory of several layers: as an inode without names, and its parts."""
        parts: _Stack = []
        hides = False
        for layer, parent in stack:
            inode = parent.children.get(name)
            if inode is None:
                continue
            if inode.is_dir:
                parts.append((layer, inode))
            hides = not inode.is_dir or inode.is_opaque
            if hides:
                break
        merged = _bare(parts[0][1])
        if hides and self._keep:
            merged.xattrs[OPAQUE_XATTR] = b"y"
        return merged, parts

    def _copy(self, layer: int, inode: Inode) -> Inode:
        original = self._originals.get(inode, inode)
        copy = self._copies.get(original)
        if copy is None:
            remap = self._remaps[layer]
            extents = [_moved(extent, remap) for extent in inode.extents]
            copy = replace(inode, xattrs=dict(inode.xattrs), extents=extents, children={})
            self._copies[original] = copy
        return copy


def _look(tree: Tree, path: bytes) -> Inode | None:
    """What a tree alone has under a path."""
    inode: Inode | None = tree.root
    for name in path.split(b"/"):
        inode = inode.children.get(name) if inode is not None else None
    return inode


def _names(stack: _Stack) -> list[bytes]:
    if len(stack) == 1:
        return list(stack[0][1].children)
    return list(dict.fromkeys(name for _, inode in stack for name in inode.children))


def _bare(directory: Inode) -> Inode:
    """A directory's attributes alone."""
    xattrs = {name: value for name, value in directory.xattrs.items() if name != OPAQUE_XATTR}
    return replace(directory, xattrs=xattrs, extents=[], children={})


def _moved(extent: Extent, remap: list[int]) -> Extent:
    if extent.device < 0 or remap[extent.device] == extent.device:
        return extent
    return Extent(remap[extent.device], extent.block, extent.blocks)
