"""Environments made in memory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dsec.images.erofs.tree import Inode, Tree
from dsec.images.lint.engine import lint
from dsec.images.lint.environment import Environment, Surroundings
from dsec.images.overlaid import Part
from dsec.images.records import ImageConfig
from dsec.wire.public_v1 import LintReport, LintRequest

PASSWD = b"""\
root:x:0:0:root:/root:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
agent:x:1000:1000::/home/agent:/bin/bash
"""
GROUP = b"root:x:0:\nshadow:x:42:\nnogroup:x:65534:\nagent:x:1000:\n"
STATUS = b"""\
Package: bash
Status: install ok installed
Version: 5.2

Package: removed
Status: deinstall ok config-files
"""
CONFIG = ImageConfig(env={"PATH": "/usr/local/bin:/usr/bin", "GPG_KEY": "A035C8C19219BA821ECEA86B"})


class Sketch:
    """A tree with the content of its files beside it."""

    def __init__(self, label: str = "image") -> None:
        self.label = label
        self.root = Inode(stat.S_IFDIR | 0o755)
        self.contents: dict[int, bytes] = {}

    def put(self, path: str | bytes, inode: Inode) -> Inode:
        """An inode under an absolute path; directories on the way are made."""
        raw = path.encode() if isinstance(path, str) else path
        *above, name = raw.strip(b"/").split(b"/")
        at = self.root
        for part in above:
            at = at.children.setdefault(part, Inode(stat.S_IFDIR | 0o755))
        at.children[name] = inode
        return inode

    def file(
        self,
        path: str | bytes,
        content: bytes = b"x",
        mode: int = 0o644,
        uid: int = 0,
        gid: int = 0,
    ) -> Inode:
        inode = Inode(stat.S_IFREG | mode, uid, gid, size=len(content))
        self.contents[id(inode)] = content
        return self.put(path, inode)

    def dir(self, path: str, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Inode:
        return self.put(path, Inode(stat.S_IFDIR | mode, uid, gid))

    def link(self, path: str, target: bytes) -> Inode:
        return self.put(path, Inode(stat.S_IFLNK | 0o777, target=target))

    def whiteout(self, path: str) -> Inode:
        return self.put(path, Inode(stat.S_IFCHR))

    def take(self, directory: Path, at: str) -> None:
        """A directory of this host, with its files."""
        for above, directories, names in os.walk(directory):
            for name in directories:
                self.dir(f"{at}/{(Path(above) / name).relative_to(directory)}")
            for name in names:
                file = Path(above) / name
                self.file(f"{at}/{file.relative_to(directory)}", file.read_bytes())


def debian() -> Sketch:
    """What is in any image, and no finding."""
    s = Sketch()
    s.file("/etc/passwd", PASSWD)
    s.file("/etc/group", GROUP)
    s.dir("/root", 0o700)
    s.dir("/home/agent", 0o755, 1000, 1000)
    s.dir("/tmp", 0o1777)
    s.link("/bin", b"usr/bin")
    s.file("/usr/bin/su", mode=0o4755)
    s.file("/usr/bin/chage", mode=0o2755, gid=42)
    s.file("/usr/bin/bash", b"\x7fELF ghp_ -----BEGIN PRIVATE KEY-----", mode=0o755)
    s.file("/usr/bin/ping", mode=0o755).xattrs[b"security.capability"] = _caps(1 << 13)
    s.file("/var/lib/dpkg/status", STATUS)
    s.file("/var/lib/dpkg/info/bash.list", b"/.\n/bin\n/bin/bash\n/etc/skel/known.key\n")
    s.file("/etc/skel/known.key", KEY)
    s.file("/usr/lib/python3.11/site-packages/p-1.dist-info/METADATA")
    s.file("/usr/lib/python3.11/site-packages/p-1.dist-info/RECORD")
    s.file("/usr/lib/python3.11/site-packages/p/solution.patch")
    s.file("/usr/share/doc/urls.txt", b"http://user:password@example.com ftp://$U:$P@host")
    s.file(
        "/usr/share/doc/README",
        b"AKIAIOSFODNN7" + b"EXAMPLE use -----BEGIN RSA PRIVATE KEY-----\n...",
    )
    s.file("/app/main.py", b"print('a solution')\n")
    return s


KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbm\n"


def _caps(permitted: int) -> bytes:
    words = [0x02000001, permitted & 0xFFFFFFFF, 0, permitted >> 32, 0]
    return b"".join(word.to_bytes(4, "little") for word in words)


capability = _caps


def environment(
    *sketches: Sketch,
    config: ImageConfig = CONFIG,
    around: Surroundings | None = None,
    budget_bytes: int = 1 << 30,
) -> Environment:
    """Sketches over each other, bottom first."""
    contents: dict[int, bytes] = {}
    for sketch in sketches:
        contents |= sketch.contents

    def read(part: int, inode: Inode, offset: int, length: int) -> bytes:
        return contents[id(inode)][offset : offset + length]

    parts = [Part(sketch.label, Tree(sketch.root)) for sketch in sketches]
    return Environment(parts, config, read, around, budget_bytes)


def report(env: Environment, request: LintRequest | None = None) -> LintReport:
    return lint(env, request or LintRequest(image="i"))


def found(env: Environment, request: LintRequest | None = None) -> list[tuple[str, str]]:
    """Rules and paths."""
    return [(f.rule, f.path) for f in report(env, request).findings]
