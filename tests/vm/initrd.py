"""The guest's first file system: busybox, a few modules of the kernel, `init`."""

from __future__ import annotations

import lzma
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.vm.kernel import Kernel

MODULES = ("virtio_blk", "erofs", "overlay", "loop")
"""What the kernel has as modules of what a sandbox and the guest itself need."""
INIT = Path(__file__).with_name("init")


def build(kernel: Kernel, target: Path) -> None:
    """Write the archive (uncompressed: a guest without KVM would unpack slowly)."""
    order = _in_order(kernel.modules)
    archive = _Archive()
    for directory in ("bin", "modules", "dev", "proc", "sys", "run"):
        archive.add(directory, 0o040755)
    archive.add("bin/busybox", 0o100755, Path(_busybox()).read_bytes())
    archive.add("bin/sh", 0o120777, b"busybox")
    archive.add("init", 0o100755, INIT.read_bytes())
    for name, code in order.items():
        archive.add(f"modules/{name}", 0o100644, code)
    archive.add("modules/order", 0o100644, "\n".join([*order, ""]).encode())
    target.write_bytes(archive.end())


def _busybox() -> str:
    found = shutil.which("busybox")
    if found is None:
        raise FileNotFoundError("busybox (Debian: busybox-static)")
    return found


def _in_order(modules: Path) -> dict[str, bytes]:
    """Name -> code, each after those it depends on."""
    files = {_name(path): path for path in modules.rglob("*.ko*")}
    order: dict[str, bytes] = {}
    for name in MODULES:
        _load(name, files, order)
    return order


def _name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def _load(name: str, files: dict[str, Path], order: dict[str, bytes]) -> None:
    if name in order or name not in files:  # not there: built into this kernel
        return
    raw = files[name].read_bytes()
    code = lzma.decompress(raw) if files[name].suffix == ".xz" else raw
    for needed in _needs(code):
        _load(needed, files, order)
    order[name] = code


def _needs(code: bytes) -> Iterator[str]:
    for listed in re.findall(rb"\0depends=([\w,-]+)\0", code):
        yield from (name.replace("-", "_") for name in listed.decode().split(","))


class _Archive:
    """cpio in its `newc` form, all the kernel takes."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._inodes = 0

    def add(self, name: str, mode: int, content: bytes = b"") -> None:
        self._inodes += 1
        path = name.encode() + b"\0"
        fields = [self._inodes, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0]
        self._data += b"070701" + b"".join(b"%08x" % field for field in fields) + path
        self._pad()
        self._data += content
        self._pad()

    def _pad(self) -> None:
        self._data += bytes(-len(self._data) % 4)

    def end(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return bytes(self._data)
