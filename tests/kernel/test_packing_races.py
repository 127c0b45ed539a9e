"""A call that is writing while its file is looked at: what is packed is what it left."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.images.oci.layer import Limits
from dsec.images.packer import Packer
from dsec.images.residue import Sieve
from tests.kernel.uppers import aged

pytestmark = [pytest.mark.needs_root]

_HALF = 1 << 20
_USERFAULTFD = {"x86_64": 323, "aarch64": 282}[os.uname().machine]
_API, _REGISTER, _COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03


@contextmanager
def half_there(first: bytes, second: bytes) -> Iterator[tuple[mmap.mmap, threading.Event]]:
    """Memory whose second half is not there, for whoever reads it, until the event is set."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_USERFAULTFD, os.O_CLOEXEC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    go_on = threading.Event()
    with mmap.mmap(-1, 2 * _HALF, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        held = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(held) + _HALF
        memory[:_HALF] = first
        source = ctypes.create_string_buffer(second, _HALF)
        fcntl.ioctl(descriptor, _API, bytearray(struct.pack("=QQQ", 0xAA, 0, 0)))
        fcntl.ioctl(descriptor, _REGISTER, bytearray(struct.pack("=QQQQ", start, _HALF, 1, 0)))

        def fill() -> None:
            go_on.wait()
            request = struct.pack("=QQQQq", start, ctypes.addressof(source), _HALF, 0, 0)
            fcntl.ioctl(descriptor, _COPY, bytearray(request))

        filler = threading.Thread(target=fill)
        filler.start()
        try:
            yield memory, go_on
        finally:
            go_on.set()
            filler.join()
            os.close(descriptor)
            del held


@contextmanager
def writing(file: Path, memory: mmap.mmap) -> Iterator[None]:
    """One call that writes over a file, begun long ago when this is entered; over at the end."""
    before = file.stat().st_ctime_ns
    descriptor = os.open(file, os.O_WRONLY)
    writer = threading.Thread(target=os.pwrite, args=(descriptor, memory, 0))
    writer.start()
    try:
        while file.stat().st_ctime_ns == before:
            pass
        aged(file)
        yield
    finally:
        writer.join()
        os.close(descriptor)


def test_a_call_that_writes_across_the_look_is_packed_whole(tmp_path: Path) -> None:
    file, out = tmp_path / "upper/file", tmp_path / "out"
    file.parent.mkdir()
    out.mkdir()
    file.write_bytes(b"o" * 2 * _HALF)
    aged(file)
    with half_there(b"1" * _HALF, b"2" * _HALF) as (memory, go_on):
        with Packer(out, file.parent, Sieve(clean=True), Limits(100, 1 << 30)) as packer:
            with writing(file, memory):
                packer.look()
                go_on.set()
            packer.take()
            packer.finish()
    assert file.read_bytes() == b"1" * _HALF + b"2" * _HALF
    assert (out / "data").read_bytes() == file.read_bytes()
