"""The file tree every simulated sandbox begins with, whatever its image holds."""

from __future__ import annotations

from collections.abc import Iterable

from dsec.edge.sim.filesystem import Device, Directory, FileSystem, Node, RegularFile, Symlink

PASSWD = b"""root:x:0:0:root:/root:/bin/sh
user:x:1000:1000:user:/home/user:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/false
"""
GROUP = b"""root:x:0:
user:x:1000:
nogroup:x:65534:
"""


def furnish(fs: FileSystem, programs: Iterable[str], hostname: str) -> None:
    """Make the directories, accounts, devices and programs."""
    for path, mode, owner in (
        (b"/bin", 0o755, 0),
        (b"/dev", 0o755, 0),
        (b"/etc", 0o755, 0),
        (b"/home", 0o755, 0),
        (b"/home/user", 0o755, 1000),
        (b"/root", 0o700, 0),
        (b"/tmp", 0o1777, 0),
        (b"/usr", 0o755, 0),
        (b"/var", 0o755, 0),
        (b"/var/tmp", 0o1777, 0),
    ):
        _add(fs, path, Directory(mode=mode, uid=owner, gid=owner))
    _add(fs, b"/usr/bin", Symlink(mode=0o777, target=b"../bin"))
    for device in ("null", "zero", "full", "tty"):
        _add(fs, b"/dev/" + device.encode(), Device(mode=0o666, name=device))
    _add(fs, b"/etc/passwd", _text(PASSWD))
    _add(fs, b"/etc/group", _text(GROUP))
    _add(fs, b"/etc/hostname", _text(hostname.encode() + b"\n"))
    _add(fs, b"/etc/hosts", _text(f"127.0.0.1 localhost {hostname}\n".encode()))
    for program in programs:
        path = b"/probe" if program == "probe" else b"/bin/" + program.encode()
        data = bytearray(b"\x7fSIM " + program.encode())
        _add(fs, path, RegularFile(mode=0o755, data=data, program=program))


def _text(content: bytes) -> RegularFile:
    return RegularFile(mode=0o644, data=bytearray(content))


def _add(fs: FileSystem, path: bytes, node: Node) -> None:
    node.mtime = fs.now()
    fs.put(fs.walk(path), node)
