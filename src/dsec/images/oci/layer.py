"""Entries of a layer's tar, one by one, into a tree in memory with overlayfs's marks.

`.wh.x` becomes a 0:0 character device, `.wh..wh..opq` the xattr `trusted.overlay.opaque`. A tar
may lean on the layers below it: by a hard link to a file of theirs (copied up: its data stays where
it is), by parents it does not list (their owner and mode are taken from below) or by going through
a symbolic link of theirs. Then the result fits over those layers alone, and the report says so.

Names are looked up in the tree and nowhere else: no entry can reach a file of this host. Content
goes into one data file in the order it comes; what a later entry replaces stays in it, unused.
"""

from __future__ import annotations

import functools
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace

from dsec.base.errors import InvalidRequest, PayloadTooLarge
from dsec.images.erofs.data import DataWriter, Readable
from dsec.images.erofs.tree import HOLE, OPAQUE_XATTR, Device, Inode, Tree
from dsec.images.oci.attributes import (
    MAX_NAME_BYTES,
    MAX_PATH_BYTES,
    inherited_xattrs,
    inode_of,
    keep_xattrs,
    show,
    split_name,
    xattrs_of,
)
from dsec.images.oci.place import Place
from dsec.images.oci.sparse import spread

_WHITEOUT = b".wh."
_META = b".wh..wh."
_OPAQUE = b".wh..wh..opq"
_MAX_HOPS = 40
_MAX_DEPTH = 256
"""Deeper trees make recursion costly for every program after this one."""


MAX_IMPLIED = 1_000
"""Directories one layer may leave to those below it: each is looked for when a sandbox is made."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one layer may hold."""

    entries: int
    size_bytes: int


class _NotThereError(Exception):
    """No directory has that name."""


class LayerBuilder:
    """Builds one layer, looking at the merged layers below it."""

    def __init__(self, below: Callable[[], Tree | None], data: DataWriter, limits: Limits) -> None:
        """Begin an empty layer.

        Args:
            below: gives the merged layers below, None for the bottom layer; called once, when the
                tar first leans on them, which few do.
            data: where contents go; its device is the first of the layer's.
            limits: how much it may hold.
        """
        self.entries = 0
        """Entries so far, and directories nobody listed."""
        self.size_bytes = 0
        """Of regular files so far, those replaced and those copied up among them."""
        self.dropped_xattrs = 0
        self.own_data: Device | None = None
        """Known at the end; None if no file has content."""
        self._leans_on_lower = False
        self._below = functools.cache(below)
        self._data = data
        self._limits = limits
        self._root = Place(_directory(), self._below_root)
        self._root_listed = False
        self._known: dict[tuple[bytes, ...], Place] = {}
        """Where directories named in the tar really are, until something is replaced or hidden."""
        self._borrowed: list[Inode] = []
        """Their extents count devices as the layers below do, until the end."""

    @property
    def self_contained(self) -> bool:
        """Whether the result is right over any layers."""
        return not self._leans_on_lower and not any(p.implied for p in self._root.walk())

    @property
    def implied(self) -> list[str]:
        """Directories no entry lists, as absolute paths: their attributes are those of below.

        One that hides what is below is its own. One whose name is no UTF-8 is left out: no record
        can say it.
        """
        root = [] if self._root_listed else ["/"]
        return root + sorted(path for place in self._root.walk() if (path := _implied_at(place)))

    def add(self, member: tarfile.TarInfo, content: Readable | None) -> None:
        """Take one entry.

        Args:
            member: its header.
            content: the bytes the archive has of a regular file; of a sparse one (`member.sparse`)
                those of its pieces, one after the other.

        Raises:
            InvalidRequest: the entry makes no sense, or its content ends early.
            PayloadTooLarge: the layer exceeds its limits.
            OSError: the data file cannot be written.
        """
        self._count()
        parts = split_name(member.name)
        if not parts:
            self._add_root(member)
        elif parts[-1].startswith(_WHITEOUT):
            self._add_whiteout(parts[:-1], parts[-1])
        else:
            place = self._place(parts[:-1])
            _check_name(place, parts[-1])
            self._make(member, place, parts[-1], content)

    def finish(self) -> Tree:
        """The layer: marks are set now, whatever the order of entries was.

        Its own data is the first of its devices, if it has any.

        Raises:
            OSError: the data file cannot be written.
        """
        below = self._below_root() if self._root.opaque else None
        if below is not None:  # overlayfs ignores an opaque root: hide each name below instead
            self._root.hidden |= dict.fromkeys(below.children)
        for place in self._root.walk():
            _mark(place)
        self.own_data = self._data.finish()
        own = [self.own_data] if self.own_data is not None else []
        return Tree(self._root.inode, self._settle(own))

    def _below_root(self) -> Inode | None:
        below = self._below()
        return below.root if below is not None else None

    # -- where things are ---------------------------------------------------------------------

    def _place(self, parts: tuple[bytes, ...]) -> Place:
        """Where a directory named in the tar really is, made if need be."""
        place = self._known.get(parts)
        if place is None:
            place = self._known[parts] = self._walk(parts, self._enter)
        return place

    def _find(self, parts: tuple[bytes, ...]) -> Place | None:
        """Likewise, but None where neither this layer nor one below has such a directory."""
        if parts in self._known:
            return self._known[parts]
        try:
            return self._walk(parts, self._visit)
        except _NotThereError:
            return None

    def _walk(self, parts: tuple[bytes, ...], enter: Callable[[Place, bytes], Place]) -> Place:
        pending, hops, place = list(reversed(parts)), 0, self._root
        while pending:
            name = pending.pop()
            if name in (b"", b".", b".."):
                place = place.up or place if name == b".." else place
                continue
            target = self._symlink(place, name)
            if target is None:
                place = enter(place, name)
                continue
            hops += 1
            if hops > _MAX_HOPS:
                raise InvalidRequest(f"too many symbolic links in {show(b'/'.join(parts))}")
            place = self._root if target.startswith(b"/") else place
            pending.extend(reversed(target.split(b"/")))
        return place

    def _symlink(self, place: Place, name: bytes) -> bytes | None:
        """The target, if that name is a symbolic link here or shows one below."""
        inode = place.inode.children.get(name)
        if inode is not None:
            return inode.target if stat.S_ISLNK(inode.mode) else None
        below = place.look_below(name)
        if below is None or not stat.S_ISLNK(below.mode):
            return None
        self._leans_on_lower = True
        return below.target

    def _enter(self, place: Place, name: bytes) -> Place:
        inode = place.inode.children.get(name)
        if inode is None:
            return self._imply(place, name)
        if not inode.is_dir:
            raise InvalidRequest(f"the archive puts a file into {show(name)}, not a directory")
        return place.enter(name)

    def _visit(self, place: Place, name: bytes) -> Place:
        """Go into a directory only if there may be something in it to hide."""
        inode = place.inode.children.get(name)
        if inode.is_dir if inode is not None else self._may_be_below(place, name):
            return self._enter(place, name)
        raise _NotThereError

    def _may_be_below(self, place: Place, name: bytes) -> bool:
        """Whether the layers below have such a directory; if they are not known, they may."""
        if place.is_covered or place.opaque or name in place.hidden:
            return False
        if self._below() is None:
            return True
        self._leans_on_lower = True
        found = place.look_below(name)
        return found is not None and found.is_dir

    def _imply(self, place: Place, name: bytes) -> Place:
        """Make a directory no entry has listed so far, as it is below."""
        _check_name(place, name)
        self._count()
        below = place.look_below(name)
        is_dir = below is not None and below.is_dir
        place.put(name, _copy(below) if below is not None and is_dir else _directory())
        made = place.enter(name)
        made.implied = True
        return made

    # -- entries ------------------------------------------------------------------------------

    def _count(self) -> None:
        self.entries += 1
        if self.entries > self._limits.entries:
            raise PayloadTooLarge(f"the layer has more than {self._limits.entries} entries")

    def _charge(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        if size_bytes < 0 or self.size_bytes > self._limits.size_bytes:
            raise PayloadTooLarge(f"the layer holds more than {self._limits.size_bytes} bytes")

    def _describe(self, member: tarfile.TarInfo) -> Inode:
        inode = inode_of(member)
        if member.pax_headers:
            self.dropped_xattrs += keep_xattrs(inode, xattrs_of(member.pax_headers))
        return inode

    def _add_root(self, member: tarfile.TarInfo) -> None:
        if member.isdir():
            self._root_listed = True
            _overwrite(self._root.inode, self._describe(member))

    def _add_whiteout(self, parts: tuple[bytes, ...], name: bytes) -> None:
        """Hide something below. Where nothing can be, nothing is made for the mark's sake."""
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in (b"", b".", b".."):
            raise InvalidRequest(f"the archive has a whiteout named {show(name)}")
        if name.startswith(_META) and name != _OPAQUE:
            return  # AUFS's own book-keeping
        place = self._find(parts)
        if place is None:
            return
        if name == _OPAQUE:
            self._leans_on_lower |= place is self._root
            place.opaque = True
            place.cover()
        else:
            _check_name(place, hidden)
            place.hide(hidden)
        self._known.clear()

    def _make(
        self, member: tarfile.TarInfo, place: Place, name: bytes, content: Readable | None
    ) -> None:
        if member.islnk():
            self._link(member, place, name)
            return
        inode = self._describe(member)
        if inode.is_dir:
            self._make_directory(place, name, inode)
            return
        if stat.S_ISREG(inode.mode):
            self._fill(inode, member, content)
        self._put(place, name, inode)

    def _put(self, place: Place, name: bytes, inode: Inode) -> None:
        if name in place.inode.children:
            self._known.clear()
        place.put(name, inode)

    def _make_directory(self, place: Place, name: bytes, inode: Inode) -> None:
        """A directory that is here already keeps what is in it."""
        before = place.inode.children.get(name)
        if before is None or not before.is_dir:
            self._put(place, name, inode)
            return
        _overwrite(before, inode)
        place.enter(name).implied = False

    def _fill(self, inode: Inode, member: tarfile.TarInfo, content: Readable | None) -> None:
        if content is None:
            raise InvalidRequest(f"{show(member.name)} has no content")
        self._charge(member.size)
        inode.size = member.size
        source = spread(member, content) if member.issparse() else content
        inode.extents = self._data.append(source, member.size)

    # -- hard links ---------------------------------------------------------------------------

    def _link(self, member: tarfile.TarInfo, place: Place, name: bytes) -> None:
        parts = split_name(member.linkname)
        if not parts:
            raise InvalidRequest(f"{show(member.name)} is a hard link to a directory")
        home, linked = self._place(parts[:-1]), parts[-1]
        if home is place and linked == name:
            return
        inode = home.inode.children.get(linked)
        if inode is None:
            inode = self._copy_up(home, linked, member)
        if inode.is_dir:
            raise InvalidRequest(f"{show(member.name)} is a hard link to a directory")
        replaced = place.places.get(name)
        if replaced is not None and home.is_in(replaced):
            raise InvalidRequest(f"{show(member.name)} is a hard link to something in itself")
        self._put(place, name, inode)

    def _copy_up(self, home: Place, name: bytes, member: tarfile.TarInfo) -> Inode:
        """Bring a file of the layers below into this one, to link to it."""
        below = home.look_below(name)
        if below is None:
            raise InvalidRequest(
                f"{show(member.name)} is a hard link to {show(member.linkname)}, which is nowhere"
            )
        self._leans_on_lower = True
        if below.is_dir:
            return below
        self._charge(below.size)
        inode = _copy(below)
        self._borrowed.append(inode)
        self._put(home, name, inode)
        return inode

    # -- the end ------------------------------------------------------------------------------

    def _settle(self, devices: list[Device]) -> list[Device]:
        """Have borrowed extents count devices as this layer does, after its own."""
        below = self._below() if self._borrowed else None
        if below is None:
            return devices
        numbers = {HOLE: HOLE}
        for inode in self._borrowed:
            for number in {extent.device for extent in inode.extents} - numbers.keys():
                numbers[number] = _number_of(below.devices[number], devices)
            inode.extents = [replace(e, device=numbers[e.device]) for e in inode.extents]
        return devices


def _number_of(device: Device, devices: list[Device]) -> int:
    """The device's number among these, which it joins if need be."""
    for number, known in enumerate(devices):
        if known.digest == device.digest:
            return number
    devices.append(device)
    return len(devices) - 1


def _directory() -> Inode:
    return Inode(stat.S_IFDIR | 0o755)


def _copy(below: Inode) -> Inode:
    return replace(below, xattrs=inherited_xattrs(below), extents=[*below.extents], children={})


def _overwrite(directory: Inode, said: Inode) -> None:
    """Take over what an entry says of a directory that is here already."""
    directory.mode, directory.mtime_ns = said.mode, said.mtime_ns
    directory.uid, directory.gid = said.uid, said.gid
    directory.xattrs = said.xattrs


def _implied_at(place: Place) -> str:
    """The path of a directory that is as below; empty if it is another one."""
    if not place.implied or place.is_covered:
        return ""
    try:
        return place.path.decode()
    except UnicodeDecodeError:
        return ""


def _check_name(place: Place, name: bytes) -> None:
    """Refuse a name no path of the kernel could hold."""
    if len(name) > MAX_NAME_BYTES:
        raise InvalidRequest(f"a name of {len(name)} bytes is too long: {show(name)}")
    if len(place.path) + 1 + len(name) > MAX_PATH_BYTES:
        raise InvalidRequest(f"the path of {show(name)} is longer than {MAX_PATH_BYTES} bytes")
    if place.depth >= _MAX_DEPTH:
        raise InvalidRequest(f"the archive has directories {place.depth + 1} deep")


def _mark(place: Place) -> None:
    """Write down what hides: a whiteout hides what is below, never what its own layer has."""
    if place.opaque and place.up is not None:
        place.inode.xattrs[OPAQUE_XATTR] = b"y"
    for name in place.hidden:
        inode = place.inode.children.get(name)
        if inode is None:
            place.inode.children[name] = Inode(stat.S_IFCHR)
        elif inode.is_dir:
            inode.xattrs[OPAQUE_XATTR] = b"y"
