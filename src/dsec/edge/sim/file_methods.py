"""File operations of the protocol on the simulated file system."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import AsyncIterator, Iterator

import msgspec

from dsec.edge.sim.errors import AetherError, file_error, invalid
from dsec.edge.sim.filesystem import (
    READ,
    SEARCH,
    WRITE,
    Device,
    Directory,
    FileSystem,
    Node,
    Place,
    RegularFile,
    Symlink,
)
from dsec.edge.sim.users import Who
from dsec.edge.sim.wire import Stream

CHUNK = 65536
BATCH = 128
Info = dict[str, object]


class PathArgs(msgspec.Struct, kw_only=True):
    """Arguments every file method has."""

    path: bytes
    user: str | None = None

    @property
    def raw(self) -> bytes:
        """The path, checked."""
        return as_path(self.path)


class ReadArgs(PathArgs, kw_only=True):
    """Arguments of `read`."""

    offset: int | None = None
    length: int | None = None


class WriteArgs(PathArgs, kw_only=True):
    """Arguments of `write`."""

    mode: int | None = None
    atomic: bool | None = True
    parents: bool | None = False
    append: bool | None = False
    sha256: str | None = None


class StatArgs(PathArgs, kw_only=True):
    """Arguments of `stat`."""

    follow: bool | None = False


class ListArgs(PathArgs, kw_only=True):
    """Arguments of `listdir`."""

    depth: int | None = 1


class MkdirArgs(PathArgs, kw_only=True):
    """Arguments of `mkdir`."""

    mode: int | None = None
    parents: bool | None = False


class MoveArgs(PathArgs, kw_only=True):
    """Arguments of `move`."""

    to: bytes
    overwrite: bool | None = True


class RemoveArgs(PathArgs, kw_only=True):
    """Arguments of `remove`."""

    recursive: bool | None = False


def as_path(raw: bytes) -> bytes:
    """Check a path of a request.

    Raises:
        AetherError: `invalid_request`, it is empty or holds a NUL byte.
    """
    if not raw or b"\0" in raw:
        raise invalid("a path must not be empty and must not hold a NUL byte")
    return raw


def parent_of(path: bytes) -> bytes:
    """Everything before the last component; PurePath cannot hold bytes."""
    return path.rstrip(b"/").rpartition(b"/")[0] or b"/"


class Files:
    """The file methods of one sandbox."""

    def __init__(self, fs: FileSystem, default_user: str) -> None:
        self.fs = fs
        self._default_user = default_user

    def who(self, user: str | None) -> Who:
        """On whose behalf."""
        return self.fs.accounts().find(user or self._default_user)

    def info(self, node: Node, path: bytes) -> Info:
        """A file info, with the path as the caller wrote it."""
        accounts = self.fs.accounts()
        info: Info = {
            "path": path,
            "kind": kind_of(node),
            "size_bytes": _size(node),
            "mode": node.mode,
            "uid": node.uid,
            "gid": node.gid,
            "user": accounts.user_name(node.uid),
            "group": accounts.group_name(node.gid),
            "mtime": node.mtime,
        }
        if isinstance(node, Symlink):
            info["target"] = os.fsdecode(node.target)
        return info

    async def read(self, stream: Stream, args: ReadArgs) -> Info:
        """`read`: info, data, count."""
        node, _ = self.fs.find(args.raw, who=self.who(args.user))
        self.fs.check(node, self.who(args.user), READ, args.raw)
        offset, length = args.offset or 0, args.length
        if offset < 0 or (length or 0) < 0:
            raise invalid("offset and length must not be negative")
        if isinstance(node, Directory):
            raise file_error(errno.EISDIR, args.raw)
        await stream.event(self.info(node, args.raw))
        sent = 0
        async for piece in _content(node, offset, length):
            await stream.data(piece)
            sent += len(piece)
        return {"bytes": sent}

    async def write(self, stream: Stream, args: WriteArgs) -> Info:
        """`write`: take the data, check it, put it in place."""
        who = self.who(args.user)
        if args.parents:
            self.fs.make_directories(parent_of(args.raw), who=who)
        self._may_write(args, who)
        digest = hashlib.sha256()
        parts: list[bytes] = []
        node = None if args.atomic and not args.append else self._open(args, who)
        async for data in stream.incoming():
            digest.update(data)
            parts.append(data)
        sha256 = digest.hexdigest()
        if args.sha256 and args.sha256.lower() != sha256:
            raise AetherError("conflict", f"the data's SHA-256 is {sha256}, not {args.sha256}")
        place = self.fs.walk(args.raw, who=who)
        self._store(args, who, place, node, b"".join(parts))
        written = self.fs.walk(args.raw, who=who).node
        if written is None:
            raise file_error(errno.ENOENT, args.raw)
        return {**self.info(written, args.raw), "sha256": sha256}

    def _may_write(self, args: WriteArgs, who: Who) -> None:
        place = self.fs.walk(args.raw, who=who)
        if isinstance(place.node, Directory) or args.raw.endswith(b"/"):
            raise file_error(errno.EISDIR, args.raw)
        if place.node is not None:
            self.fs.check(place.node, who, WRITE, args.raw)
        if place.node is None or (args.atomic and not args.append):
            self.fs.may_change(place, who)

    def _open(self, args: WriteArgs, who: Who) -> RegularFile | Device:
        # With a digest to meet, nothing may change before all data is there.
        early = not args.append and not args.sha256
        node, _ = self.fs.open_file(
            args.raw, who, truncate=early, mode=0o644 if args.mode is None else args.mode
        )
        return node

    def _store(
        self,
        args: WriteArgs,
        who: Who,
        place: Place,
        node: RegularFile | Device | None,
        data: bytes,
    ) -> None:
        if isinstance(place.node, Device):
            return
        if node is None:
            node = self._replacement(place.node, who)
            node.data += data
            self.fs.put(place, node, "write" if place.node else "create")
        elif isinstance(node, RegularFile):
            if not args.append:
                node.data.clear()
            node.data += data
            self.fs.emit(place.path, "write")
        node.mtime = self.fs.now()
        if args.mode is not None:
            node.mode = args.mode & 0o7777

    def _replacement(self, old: Node | None, who: Who) -> RegularFile:
        if isinstance(old, RegularFile):
            return RegularFile(mode=old.mode, uid=old.uid, gid=old.gid)
        return RegularFile(mode=0o644, uid=who.uid, gid=who.gid)

    async def stat(self, _stream: Stream, args: StatArgs) -> Info:
        """`stat`."""
        node, _ = self.fs.find(args.raw, who=self.who(args.user), follow=bool(args.follow))
        return self.info(node, args.raw)

    async def listdir(self, stream: Stream, args: ListArgs) -> Info:
        """`listdir`: batches, then the count."""
        who = self.who(args.user)
        node, _ = self.fs.find(args.raw, who=who)
        if not isinstance(node, Directory):
            raise file_error(errno.ENOTDIR, args.raw)
        depth = 1 if args.depth is None else args.depth
        if depth < 1:
            raise invalid("depth must be at least 1")
        self.fs.check(node, who, READ, args.raw)
        found = [self.info(n, path) for path, n in self._below(node, args.raw, depth, who)]
        for at in range(0, len(found), BATCH):
            await stream.event({"entries": found[at : at + BATCH]})
        return {"count": len(found)}

    def _below(
        self, directory: Directory, path: bytes, depth: int, who: Who
    ) -> Iterator[tuple[bytes, Node]]:
        for name, node in sorted(directory.entries.items()):
            below = path.rstrip(b"/") + b"/" + name
            yield below, node
            readable = who.may(node.mode, node.uid, node.gid, READ | SEARCH)
            if depth > 1 and isinstance(node, Directory) and readable:
                yield from self._below(node, below, depth - 1, who)

    async def mkdir(self, _stream: Stream, args: MkdirArgs) -> Info:
        """`mkdir`."""
        who = self.who(args.user)
        mode = 0o755 if args.mode is None else args.mode & 0o7777
        if args.parents:
            self.fs.make_directories(parent_of(args.raw), who=who)
        place = self.fs.walk(args.raw, who=who)
        node = place.node
        if node is None:
            self.fs.may_change(place, who)
            node = Directory(mode=mode, uid=who.uid, gid=who.gid, mtime=self.fs.now())
            self.fs.put(place, node)
        elif not args.parents or not isinstance(node, Directory):
            raise file_error(errno.EEXIST, args.raw)
        return self.info(node, args.raw)

    async def move(self, _stream: Stream, args: MoveArgs) -> Info:
        """`move`."""
        who = self.who(args.user)
        to = as_path(args.to)
        node, source = self.fs.find(args.raw, who=who, follow=False)
        target = self.fs.walk(to, who=who, follow=False)
        self.fs.may_change(source, who)
        self.fs.may_change(target, who)
        if target.node is node:
            return self.info(node, to)
        if target.node is not None:
            self._may_replace(node, target, to, overwrite=args.overwrite is not False)
        if target.path.startswith(source.path + b"/"):
            raise file_error(errno.EINVAL, to)
        self.fs.drop(source, "rename")
        self.fs.put(target, node, "rename")
        return self.info(node, to)

    def _may_replace(self, node: Node, target: Place, to: bytes, *, overwrite: bool) -> None:
        old = target.node
        if not overwrite:
            raise file_error(errno.EEXIST, to)
        if isinstance(old, Directory) and not isinstance(node, Directory):
            raise file_error(errno.EISDIR, to)
        if isinstance(node, Directory) and not isinstance(old, Directory):
            raise file_error(errno.ENOTDIR, to)
        if isinstance(old, Directory) and old.entries:
            raise file_error(errno.ENOTEMPTY, to)

    async def remove(self, _stream: Stream, args: RemoveArgs) -> Info:
        """`remove`."""
        who = self.who(args.user)
        node, place = self.fs.find(args.raw, who=who, follow=False)
        self.fs.may_change(place, who)
        if isinstance(node, Directory) and node.entries and not args.recursive:
            raise file_error(errno.ENOTEMPTY, args.raw)
        if place.node is self.fs.root:
            raise file_error(errno.EBUSY, args.raw)
        return {"removed": self._remove_below(place, who)}

    def _remove_below(self, place: Place, who: Who) -> int:
        count = 1
        node = place.node
        if isinstance(node, Directory):
            for name, child in list(node.entries.items()):
                below = Place(node, name, child, place.path + b"/" + name)
                self.fs.may_change(below, who)
                count += self._remove_below(below, who)
        self.fs.drop(place)
        return count


def kind_of(node: Node) -> str:
    """As in `FileInfo.kind`."""
    if isinstance(node, Directory):
        return "dir"
    if isinstance(node, Symlink):
        return "symlink"
    return "char" if isinstance(node, Device) else "file"


def _size(node: Node) -> int:
    if isinstance(node, RegularFile):
        return len(node.data)
    return len(node.target) if isinstance(node, Symlink) else 0


async def _content(node: Node, offset: int, length: int | None) -> AsyncIterator[bytes]:
    if isinstance(node, Device):
        for at in range(0, 0 if node.name == "null" else length or 0, CHUNK):
            yield bytes(min(CHUNK, (length or 0) - at))
        return
    if isinstance(node, RegularFile):
        # A snapshot: a writer that replaces the file meanwhile is never mixed in.
        data = bytes(node.data)
        end = len(data) if length is None else min(offset + length, len(data))
        for at in range(offset, end, CHUNK):
            yield data[at : min(at + CHUNK, end)]
