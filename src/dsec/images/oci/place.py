"""A directory of a layer under construction, beside what the layers below have in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dsec.images.erofs.tree import Inode

Look = Callable[[], Inode | None]


@dataclass(slots=True, eq=False)
class Place:
    """One directory, and where it is."""

    inode: Inode
    look: Look | None
    """Finds what the layers below have here; called when first needed: few layers need it."""
    up: Place | None = None
    """The directory it is in; None for the root."""
    depth: int = 0
    """Directories above it."""
    path: bytes = b""
    """With a leading slash; the root's is empty."""
    implied: bool = False
    """No entry listed it: it was made for what is in it."""
    opaque: bool = False
    hidden: dict[bytes, None] = field(default_factory=dict)
    """Names of which nothing shows through from below."""
    places: dict[bytes, Place] = field(default_factory=dict)
    """Directories in it that somebody went into."""
    seen: Inode | None = None
    """What `look` found."""
    is_covered: bool = False
    """Whatever the layers below have here, or had in its place, is hidden."""

    @property
    def below(self) -> Inode | None:
        """The directory of the layers below that shows through, if any."""
        if self.look is not None:
            found, self.look = self.look(), None
            self.seen = found if found is not None and found.is_dir else None
        return self.seen

    def look_below(self, name: bytes) -> Inode | None:
        """What the layers below have under a name, unless this layer hides it."""
        if name in self.hidden or self.below is None:
            return None
        return self.below.children.get(name)

    def enter(self, name: bytes) -> Place:
        """The directory of that name, which the layer has."""
        place = self.places.get(name)
        if place is None:
            place = self.places[name] = Place(
                self.inode.children[name],
                functools.partial(self.look_below, name),
                self,
                self.depth + 1,
                b"%s/%s" % (self.path, name),
                is_covered=self.is_covered or self.opaque or name in self.hidden,
            )
        return place

    def put(self, name: bytes, inode: Inode) -> None:
        """Give the name to an inode, whatever had it.

        A file that was here hid what is below: a directory that replaces it must go on doing so.
        """
        before = self.inode.children.get(name)
        if before is not None:
            self.places.pop(name, None)
            if not before.is_dir:
                self.hide(name)
        self.inode.children[name] = inode

    def hide(self, name: bytes) -> None:
        """Let nothing below show through under that name."""
        self.hidden[name] = None
        if name in self.places:
            self.places[name].is_covered = True
            self.places[name].cover()

    def cover(self) -> None:
        """Let nothing below show through here and further down."""
        for place in self.walk():
            place.look = place.seen = None
            place.is_covered |= place is not self

    def is_in(self, other: Place) -> bool:
        """Whether it is the other directory, or is somewhere in it."""
        here: Place | None = self
        while here is not None and here is not other:
            here = here.up
        return here is other

    def walk(self) -> Iterator[Place]:
        """This one and all further down that somebody went into."""
        pending = [self]
        while pending:
            place = pending.pop()
            yield place
            pending.extend(place.places.values())
