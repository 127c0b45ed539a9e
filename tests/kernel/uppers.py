"""Sandboxes without processes: an environment of a node under a real overlay that tests write to."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.images.records import Environment, SnapshotFacts
from dsec.images.service import ImageService
from dsec.linux import mounts
from dsec.wire.public_v1 import EnvironmentRef
from dsec.wire.sandbox import Pack, SnapshotView

OPTIONS = "redirect_dir=off,metacopy=off,index=off,uuid=null,xino=auto,volatile"
"""As sandboxes have them."""
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
ACL = bytes.fromhex("0200000001000600ffffffff02000600e803000004000400ffffffff")
ACL += bytes.fromhex("10000600ffffffff20000400ffffffff")

_REALTIME_COARSE = 5
"""CLOCK_REALTIME_COARSE."""


class Box:
    """What a sandbox has: a root, and the upper directory it writes to."""

    def __init__(self, name: str, environment: Environment, place: Path) -> None:
        self.name = name
        self.environment = environment
        self.upper = place / f"{name}.upper"
        self.work = place / f"{name}.work"
        self.root = place / f"{name}.root"

    async def pack(
        self,
        images: ImageService,
        name: str,
        *,
        clean: bool = True,
        exclude: list[str] | None = None,
        look: bool = True,
    ) -> SnapshotView:
        """Take a snapshot; the box stands still by itself."""
        wanted = Pack(name=name, clean=clean, exclude=exclude or [])
        async with images.snapshots.packing(self.upper, self.environment, wanted) as packing:
            if look:
                await packing.look()
            assert await packing.take()
            return await packing.keep(self.facts(name))

    def facts(self, name: str, project: str = "root") -> SnapshotFacts:
        return SnapshotFacts(
            project=project,
            name=name,
            sandbox=self.name,
            step=3,
            packed_by="someone",
            description="a test's",
            frozen_ms=1.5,
        )


@asynccontextmanager
async def boxed(
    images: ImageService, wanted: EnvironmentRef | Environment, name: str, place: Path
) -> AsyncIterator[Box]:
    """A box on an environment."""
    if isinstance(wanted, EnvironmentRef):
        wanted = await images.environments.compose(wanted)
    box = Box(name, wanted, place)
    for directory in (box.upper, box.work, box.root):
        directory.mkdir(mode=0o755)
    layers = await images.environments.mount(wanted, name)
    options = f"lowerdir={':'.join(map(str, layers))},upperdir={box.upper},workdir={box.work}"
    mounts.mount("overlay", box.root, "overlay", mounts.MountFlag.NODEV, f"{options},{OPTIONS}")
    try:
        yield box
    finally:
        mounts.umount(box.root, detach=True)
        await images.environments.release(name)


def change_much(root: Path) -> None:
    """What programs do to an image, and what only hostile ones do."""
    (root / "etc/os-release").write_text("ID=other\n")
    (root / "usr/share/gone").unlink()
    _replaced(root / "usr/share/dir")
    (root / "usr/share/emptied/inner/file").unlink()
    (root / "usr/bin/tool").chmod(0o750)
    (root / "usr/bin/tool").rename(root / "usr/bin/renamed")
    new = root / "work/new"
    new.mkdir(parents=True, mode=0o2770)
    os.chown(new, 1000, 100)
    (new / "empty").touch()
    (new / "large").write_bytes(os.urandom(300_000))
    (new / "small").write_bytes(b"small")
    os.link(new / "small", root / "work/again")
    (new / "link").symlink_to("/etc/passwd")
    (root / "work/outside").symlink_to("../../../../../../../etc")
    _special(new)
    _attributes(new)


def _replaced(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()
    directory.mkdir(mode=0o711)
    (directory / "other").write_text("only this")


def _special(new: Path) -> None:
    os.mkfifo(new / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(new / "socket"))
    with (new / "sparse").open("wb") as file:
        file.truncate(10 << 20)
        os.pwrite(file.fileno(), b"middle", 5 << 20)
    for name in (b"\xff\xfe", b"a\nb", b" ", b"-rf", b"n" * 255, "é".encode()):
        (new / os.fsdecode(name)).write_bytes(name)
    deep = new
    for number in range(100):
        deep /= f"d{number}"
    deep.mkdir(parents=True)
    (deep / "bottom").write_text("there")


def _attributes(new: Path) -> None:
    program = new / "program"
    program.write_bytes(b"program")
    program.chmod(0o4755)
    os.setxattr(program, "security.capability", CAPABILITY)
    os.setxattr(program, "user.note", b"kept")
    os.setxattr(new, "user.overlay.opaque", b"y")
    os.setxattr(new / "small", "system.posix_acl_access", ACL)
    os.utime(new / "large", ns=(1, 1_234_567_890_123_456_789))


def aged(path: Path) -> None:
    """Wait until the clock that files' times are taken from has gone on."""
    while time.clock_gettime_ns(_REALTIME_COARSE) <= path.stat().st_ctime_ns:
        pass


def entries_of(upper: Path) -> dict[str, int]:
    """Names and kinds of what an upper directory has."""
    return {
        str(path.relative_to(upper)): stat.S_IFMT(path.lstat().st_mode) for path in upper.rglob("*")
    }
