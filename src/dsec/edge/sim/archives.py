"""Whole trees as tar streams, out of and into the simulated file system."""

from __future__ import annotations

import errno
import io
import os
import tarfile

from dsec.edge.sim.errors import AetherError, file_error, invalid
from dsec.edge.sim.file_methods import CHUNK, Files, Info, PathArgs, parent_of
from dsec.edge.sim.filesystem import Directory, Node, Place, RegularFile, Symlink
from dsec.edge.sim.users import Who
from dsec.edge.sim.wire import Stream


async def tar_out(files: Files, stream: Stream, args: PathArgs) -> Info:
    """`tar_out`: everything below a directory, names relative to it."""
    who = files.who(args.user)
    node, _ = files.fs.find(args.raw, who=who)
    if not isinstance(node, Directory):
        raise file_error(errno.ENOTDIR, args.raw)
    pending = io.BytesIO()
    first_names: dict[int, bytes] = {}
    count = 0
    with tarfile.open(
        fileobj=pending, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape"
    ) as archive:
        for name, below in _walk(node, b"", who):
            _add(archive, name, below, first_names)
            count += 1
            await _flush(stream, pending)
    await _flush(stream, pending)
    return {"entries": count}


def _walk(directory: Directory, prefix: bytes, who: Who) -> list[tuple[bytes, Node]]:
    found: list[tuple[bytes, Node]] = []
    for name, node in sorted(directory.entries.items()):
        path = prefix + name
        if not who.may(node.mode, node.uid, node.gid, 4) and not isinstance(node, Symlink):
            raise file_error(errno.EACCES, path)
        found.append((path, node))
        if isinstance(node, Directory):
            found += _walk(node, path + b"/", who)
    return found


def _add(archive: tarfile.TarFile, name: bytes, node: Node, first_names: dict[int, bytes]) -> None:
    member = tarfile.TarInfo(os.fsdecode(name))
    member.mode, member.uid, member.gid = node.mode, node.uid, node.gid
    member.mtime = int(node.mtime)
    content = None
    if isinstance(node, Directory):
        member.type = tarfile.DIRTYPE
    elif isinstance(node, Symlink):
        member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(node.target)
    elif isinstance(node, RegularFile):
        earlier = first_names.setdefault(id(node), name)
        if earlier != name:
            member.type, member.linkname = tarfile.LNKTYPE, os.fsdecode(earlier)
        else:
            member.size = len(node.data)
            content = io.BytesIO(node.data)
    else:
        member.type, member.devmajor, member.devminor = tarfile.CHRTYPE, 1, 3
    archive.addfile(member, content)


async def _flush(stream: Stream, pending: io.BytesIO) -> None:
    data = pending.getvalue()
    pending.seek(0)
    pending.truncate()
    for at in range(0, len(data), CHUNK):
        await stream.data(data[at : at + CHUNK])


async def tar_in(files: Files, stream: Stream, args: PathArgs) -> Info:
    """`tar_in`: unpack below a directory; nothing gets out of it whatever it is called."""
    who = files.who(args.user)
    base = files.fs.make_directories(args.raw, who=who)
    whole = b"".join([data async for data in stream.incoming()])
    count = 0
    try:
        with tarfile.open(
            fileobj=io.BytesIO(whole), mode="r:", errors="surrogateescape"
        ) as archive:
            for member in archive:
                _unpack(files, archive, member, base, who)
                count += 1
    except tarfile.TarError as error:
        raise invalid(f"not a tar stream: {error}") from None
    return {"entries": count}


def _unpack(
    files: Files, archive: tarfile.TarFile, member: tarfile.TarInfo, base: Place, who: Who
) -> None:
    fs = files.fs
    name = os.fsencode(member.name)
    if not _inside(name):
        return
    fs.make_directories(parent_of(name), who=who, root=base)
    place = fs.walk(name, who=who, root=base, follow=False)
    fs.may_change(place, who)
    node = _node(files, archive, member, base)
    if node is None:
        return
    if member.type != tarfile.LNKTYPE:
        node.uid, node.gid = (member.uid, member.gid) if who.uid == 0 else (who.uid, who.gid)
        node.mtime = member.mtime
    if isinstance(place.node, Directory):
        if not isinstance(node, Directory):
            raise AetherError("conflict", f"{member.name} is a directory already", path=name)
        place.node.mode = node.mode
        return
    fs.put(place, node)


def _node(
    files: Files, archive: tarfile.TarFile, member: tarfile.TarInfo, base: Place
) -> Node | None:
    mode = member.mode & 0o7777
    if member.isdir():
        return Directory(mode=mode)
    if member.issym():
        return Symlink(mode=0o777, target=os.fsencode(member.linkname))
    if member.islnk():
        return files.fs.walk(os.fsencode(member.linkname), root=base, follow=False).node
    content = archive.extractfile(member) if member.isreg() else None
    return RegularFile(mode=mode, data=bytearray(content.read())) if content else None


def _inside(name: bytes) -> bool:
    """Whether a name means something below the directory at all."""
    return any(part not in (b"", b".", b"..") for part in name.split(b"/"))
