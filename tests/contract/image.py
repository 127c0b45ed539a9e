"""The smallest honest image: a static busybox, the probe, and the accounts tests speak of."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

NAME = "contract"
REPOSITORY = Path(__file__).parents[2]
PASSWD = """root:x:0:0:root:/root:/bin/sh
user:x:1000:1000:user:/home/user:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/false
"""
GROUP = "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n"
DIRECTORIES = {
    "bin": (0o755, 0),
    "dev": (0o755, 0),
    "etc": (0o755, 0),
    "home": (0o755, 0),
    "home/user": (0o755, 1000),
    "proc": (0o555, 0),
    "root": (0o700, 0),
    "sys": (0o555, 0),
    "tmp": (0o1777, 0),
    "usr": (0o755, 0),
    "usr/bin": (0o755, 0),
    "var": (0o755, 0),
}


def busybox() -> Path:
    """The host's static busybox.

    Raises:
        RuntimeError: there is none; `./dev setup` installs it.
    """
    for candidate in ("/bin/busybox", "/usr/bin/busybox"):
        if os.access(candidate, os.X_OK) and _is_static(candidate):
            return Path(candidate)
    raise RuntimeError("no static busybox here: install busybox-static (./dev setup does)")


def _is_static(path: str) -> bool:
    ldd = subprocess.run(["ldd", path], capture_output=True, check=False)
    return ldd.returncode != 0


def probe() -> Path:
    """The probe's binary.

    Raises:
        RuntimeError: it is not built, or it does not do what it should.
    """
    built = REPOSITORY.glob("native/target/*-linux-*/release/probe")
    named = os.environ.get("DSEC_PROBE")
    for candidate in [Path(named)] if named else sorted(built):
        said = subprocess.run([candidate, "echo", "hi"], capture_output=True, check=False)
        if said.stdout == b"hi\n":
            return candidate
    raise RuntimeError("the probe is not built: cargo build --release in native/")


def build(target: Path) -> Path:
    """Write the image as a root file system archive."""
    with tarfile.open(target, "w") as archive:
        for name, (mode, owner) in DIRECTORIES.items():
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, mode
            member.uid = member.gid = owner
            archive.addfile(member)
        _add(archive, "bin/busybox", busybox().read_bytes(), 0o755)
        _add(archive, "probe", probe().read_bytes(), 0o755)
        _add(archive, "etc/passwd", PASSWD.encode(), 0o644)
        _add(archive, "etc/group", GROUP.encode(), 0o644)
        for applet in _applets():
            member = tarfile.TarInfo(f"bin/{applet}")
            member.type, member.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(member)
    return target


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    archive.addfile(member, io.BytesIO(data))


def _applets() -> list[str]:
    listed = subprocess.run([busybox(), "--list"], capture_output=True, check=True)
    names = listed.stdout.decode().split()
    return [name for name in names if name != "busybox"]


def empty(target: Path) -> Path:
    """An archive for a backend that only wants a name."""
    with tarfile.open(target, "w"):
        pass
    return target
