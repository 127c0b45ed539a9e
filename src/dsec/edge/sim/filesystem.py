"""A Linux-like file system in memory: inodes, path walking, permissions.

Only what the kernel would do; what the protocol makes of it is in `file_methods.py`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dsec.edge.sim.errors import file_error
from dsec.edge.sim.users import ROOT, Accounts, Who

MAX_LINKS = 40
"""Symbolic links followed in one walk, as in Linux."""
NAME_MAX = 255
READ, WRITE, SEARCH = 4, 2, 1
Watcher = Callable[[bytes, str], None]


@dataclass(kw_only=True, eq=False)
class Node:
    """An inode."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0


@dataclass(kw_only=True, eq=False)
class RegularFile(Node):
    """A file; `program` makes it executable by name."""

    data: bytearray = field(default_factory=bytearray)
    program: str = ""


@dataclass(kw_only=True, eq=False)
class Directory(Node):
    """A directory."""

    entries: dict[bytes, Node] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Symlink(Node):
    """A symbolic link."""

    target: bytes


@dataclass(kw_only=True, eq=False)
class Device(Node):
    """A character device that needs no driver: null, zero, full, tty."""

    name: str


@dataclass(frozen=True)
class Place:
    """Where a walk ended: the directory, the name in it, and what is there now, if anything."""

    parent: Directory
    name: bytes
    node: Node | None
    path: bytes
    """Absolute, without symbolic links."""


@dataclass
class _Walk:
    root: Directory
    prefix: bytes
    who: Who
    stack: list[tuple[bytes, Directory]]
    links: int = 0

    @property
    def here(self) -> Directory:
        return self.stack[-1][1] if self.stack else self.root

    @property
    def path(self) -> bytes:
        inside = b"/".join(name for name, _ in self.stack)
        return (self.prefix.rstrip(b"/") + b"/" + inside) if inside else self.prefix


class FileSystem:
    """The tree, and the rules for moving in it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.root = Directory(mode=0o755, mtime=now())
        self._watchers: list[Watcher] = []

    def walk(
        self,
        path: bytes,
        *,
        who: Who = ROOT,
        cwd: bytes = b"/",
        follow: bool = True,
        root: Place | None = None,
    ) -> Place:
        """Find the place a path names; its last component need not exist.

        Args:
            path: absolute, or relative to `cwd`.
            who: must be allowed to search every directory on the way.
            cwd: where a relative path begins.
            follow: whether a symbolic link in the last component is followed.
            root: where `/` and `..` stop; nothing above it can be reached.

        Raises:
            AetherError: as the kernel would fail.
        """
        if len(path) > 4095:
            raise file_error(errno.ENAMETOOLONG, path[:64])
        base = root.node if root is not None else self.root
        if not isinstance(base, Directory):
            raise file_error(errno.ENOTDIR, path)
        walk = _Walk(base, root.path if root else b"/", who, [])
        start = [] if path.startswith(b"/") else _parts(cwd)
        todo = deque([*start, *_parts(path)])
        while todo:
            place = self._step(walk, todo, path, follow=follow)
            if place is not None:
                return place
        return self._at(walk)

    def _step(self, walk: _Walk, todo: deque[bytes], path: bytes, *, follow: bool) -> Place | None:
        part = todo.popleft()
        if part == b"..":
            if walk.stack:
                walk.stack.pop()
            return None
        if len(part) > NAME_MAX:
            raise file_error(errno.ENAMETOOLONG, path[:64])
        here = walk.here
        if not walk.who.may(here.mode, here.uid, here.gid, SEARCH):
            raise file_error(errno.EACCES, path)
        node = here.entries.get(part)
        if isinstance(node, Symlink) and (todo or follow):
            _follow(walk, todo, node, path)
            return None
        if not todo:
            return Place(here, part, node, _join(walk.path, part))
        if node is None:
            raise file_error(errno.ENOENT, path)
        if not isinstance(node, Directory):
            raise file_error(errno.ENOTDIR, path)
        walk.stack.append((part, node))
        return None

    def _at(self, walk: _Walk) -> Place:
        node = walk.here
        parent = walk.stack[-2][1] if len(walk.stack) > 1 else walk.root
        name = walk.stack[-1][0] if walk.stack else b""
        return Place(parent, name, node, walk.path)

    def find(
        self, path: bytes, *, who: Who = ROOT, cwd: bytes = b"/", follow: bool = True
    ) -> tuple[Node, Place]:
        """The node a path names.

        Raises:
            AetherError: `not_found` if there is none.
        """
        place = self.walk(path, who=who, cwd=cwd, follow=follow)
        if place.node is None:
            raise file_error(errno.ENOENT, path)
        return place.node, place

    def make_directories(
        self, path: bytes, *, who: Who = ROOT, mode: int = 0o755, root: Place | None = None
    ) -> Place:
        """Make a directory and those above it, as far as they are missing.

        Raises:
            AetherError: as mkdir(2) would fail; something else stands in the way.
        """
        parts = _parts(path)
        place = self.walk(b"/", who=who, root=root)
        for count in range(1, len(parts) + 1):
            place = self.walk(b"/" + b"/".join(parts[:count]), who=who, root=root)
            if place.node is None:
                self.may_change(place, who)
                made = Directory(mode=mode, uid=who.uid, gid=who.gid, mtime=self.now())
                self.put(place, made)
                place = replace(place, node=made)
            elif not isinstance(place.node, Directory):
                raise file_error(errno.ENOTDIR, path)
        return place

    def check(self, node: Node, who: Who, want: int, path: bytes) -> None:
        """Demand permission bits.

        Raises:
            AetherError: `permission_denied`.
        """
        if not who.may(node.mode, node.uid, node.gid, want):
            raise file_error(errno.EACCES, path)

    def may_change(self, place: Place, who: Who) -> None:
        """Demand the right to add, replace or remove a directory's entry.

        Raises:
            AetherError: `permission_denied`, also for another's entry in a sticky directory.
        """
        self.check(place.parent, who, WRITE | SEARCH, place.path)
        if place.node is None or not place.parent.mode & 0o1000 or who.uid == 0:
            return
        if who.uid not in (place.node.uid, place.parent.uid):
            raise file_error(errno.EPERM, place.path)

    def put(self, place: Place, node: Node, event: str = "create") -> None:
        """Make an entry point at a node."""
        place.parent.entries[place.name] = node
        place.parent.mtime = self.now()
        self.emit(place.path, event)

    def drop(self, place: Place, event: str = "remove") -> None:
        """Remove an entry."""
        del place.parent.entries[place.name]
        place.parent.mtime = self.now()
        self.emit(place.path, event)

    def open_file(
        self, path: bytes, who: Who, *, cwd: bytes = b"/", truncate: bool, mode: int = 0o644
    ) -> tuple[RegularFile | Device, Place]:
        """Open for writing, making the file if it is missing; what `>` and `>>` do.

        Raises:
            AetherError: as open(2) would fail.
        """
        place = self.walk(path, who=who, cwd=cwd)
        node = place.node
        if node is None:
            self.may_change(place, who)
            node = RegularFile(mode=mode, uid=who.uid, gid=who.gid, mtime=self.now())
            self.put(place, node)
        if isinstance(node, Directory):
            raise file_error(errno.EISDIR, path)
        self.check(node, who, WRITE, path)
        if not isinstance(node, RegularFile | Device):
            raise file_error(errno.EINVAL, path)
        if truncate and isinstance(node, RegularFile):
            node.data.clear()
            node.mtime = self.now()
        return node, place

    def accounts(self) -> Accounts:
        """The sandbox's users and groups as they are now."""
        return Accounts(self._text(b"/etc/passwd"), self._text(b"/etc/group"))

    def _text(self, path: bytes) -> bytes:
        node = self.walk(path).node
        return bytes(node.data) if isinstance(node, RegularFile) else b""

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Hear of every change by absolute path, until the function returned is called."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def emit(self, path: bytes, event: str) -> None:
        """Tell the watchers."""
        for watcher in list(self._watchers):
            watcher(path, event)

    def size_bytes(self) -> int:
        """Bytes in regular files, each inode once."""
        seen: dict[int, int] = {}
        todo: list[Node] = [self.root]
        while todo:
            node = todo.pop()
            if isinstance(node, Directory):
                todo.extend(node.entries.values())
            elif isinstance(node, RegularFile):
                seen[id(node)] = len(node.data)
        return sum(seen.values())


def _follow(walk: _Walk, todo: deque[bytes], link: Symlink, path: bytes) -> None:
    walk.links += 1
    if walk.links > MAX_LINKS:
        raise file_error(errno.ELOOP, path)
    if link.target.startswith(b"/"):
        walk.stack.clear()
    todo.extendleft(reversed(_parts(link.target)))


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def _join(directory: bytes, name: bytes) -> bytes:
    return directory.rstrip(b"/") + b"/" + name
