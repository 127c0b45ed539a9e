"""What overlayfs shows of trees laid over each other, and where each name comes from. Pure.

Unlike a merge into one new tree, every entry still says which part it is of, so that a finding or
a read can be told to somebody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsec.images.erofs.tree import Inode, Tree


@dataclass(frozen=True, slots=True)
class Part:
    """One layer of an environment."""

    label: str
    """`image`, `workspace NAME` or `toolkit NAME`; an image may have several parts."""
    tree: Tree


@dataclass(frozen=True, slots=True)
class Source:
    """An inode and whose it is."""

    part: int
    """Index into the parts, bottom first."""
    inode: Inode


@dataclass(frozen=True, slots=True)
class Entry:
    """A name as it is seen from above."""

    path: bytes
    """Absolute; the root is `/`."""
    part: int
    """Whose attributes it has: the topmost part with it."""
    inode: Inode
    under: tuple[Source, ...] = ()
    """Directories it is merged with, topmost first."""

    @property
    def name(self) -> bytes:
        """The last component."""
        return self.path.rpartition(b"/")[2]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Something of a lower part that is not seen: replaced, deleted, or below an opaque directory."""

    path: bytes
    lower: Source
    upper: Source


@dataclass(frozen=True, slots=True)
class Overlaid:
    """The result: what is seen by path, parents before children, and what is not."""

    entries: dict[bytes, Entry]
    hidden: list[Hidden]


def overlay(parts: Sequence[Part]) -> Overlaid:
    """Lay parts over each other, bottom first, as overlayfs would.

    Raises:
        ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("an environment has at least one part")
    seen = Overlaid({}, [])
    top_first = [Source(number, part.tree.root) for number, part in enumerate(parts)][::-1]
    pending = [(b"/", _merged(b"/", top_first, seen.hidden))]
    while pending:
        path, sources = pending.pop()
        top = sources[0]
        seen.entries[path] = Entry(path, top.part, top.inode, tuple(sources[1:]))
        if top.inode.is_dir:
            pending.extend(_below(path, sources, seen.hidden))
    return seen


def _below(
    path: bytes, sources: list[Source], hidden: list[Hidden]
) -> Iterator[tuple[bytes, list[Source]]]:
    """The children of a directory with what each is made of, in reverse order of names."""
    by_name: dict[bytes, list[Source]] = {}
    for source in sources:
        for name, child in source.inode.children.items():
            by_name.setdefault(name, []).append(Source(source.part, child))
    prefix = path.rstrip(b"/") + b"/"
    for name in sorted(by_name, reverse=True):
        merged = _merged(prefix + name, by_name[name], hidden)
        if not merged[0].inode.is_whiteout:
            yield prefix + name, merged


def _merged(path: bytes, top_first: list[Source], hidden: list[Hidden]) -> list[Source]:
    """Those of several things of one name that are seen together; the rest is hidden."""
    seen = top_first[:1]
    if top_first[0].inode.is_dir:
        seen = list(_directories(top_first))
    below = (source for source in top_first[len(seen) :] if not source.inode.is_whiteout)
    hidden.extend(Hidden(path, lower, seen[-1]) for lower in below)
    return seen


def _directories(top_first: list[Source]) -> Iterator[Source]:
    """The directories from the top down to the first that hides what is below."""
    for source in top_first:
        if not source.inode.is_dir:
            return
        yield source
        if source.inode.is_opaque:
            return
