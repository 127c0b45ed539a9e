"""What a simulated process reads from and writes to; shared ends are counted like descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio.lowlevel
from typing_extensions import override

from dsec.edge.sim.filesystem import Device, FileSystem, Place, RegularFile
from dsec.edge.sim.pipes import PIPE_BYTES, BrokenPipe, BytePipe
from dsec.edge.sim.rings import Ring


class Source(Protocol):
    """Something to read from; empty bytes are the end."""

    is_tty: bool

    async def read(self, most: int = PIPE_BYTES) -> bytes:
        """Wait for some bytes."""
        ...


class Sink:
    """Something to write to, held open by any number of processes."""

    is_tty = False

    def __init__(self) -> None:
        self.holders = 0

    def hold(self) -> Sink:
        """One more process has it open."""
        self.holders += 1
        return self

    def release(self) -> None:
        """One process less; the last one closes it."""
        self.holders -= 1
        if self.holders == 0:
            self.finish()

    def finish(self) -> None:
        """Nobody will write any more."""

    async def write(self, data: bytes) -> None:
        """Write all of it.

        Raises:
            BrokenPipe: nobody reads.
        """
        raise NotImplementedError


class NullSource:
    """/dev/null."""

    is_tty = False

    async def read(self, most: int = PIPE_BYTES) -> bytes:  # noqa: ARG002 - a Source
        """End at once."""
        await anyio.lowlevel.checkpoint()
        return b""


class ZeroSource(NullSource):
    """/dev/zero."""

    @override
    async def read(self, most: int = PIPE_BYTES) -> bytes:
        """Any number of zeros."""
        await anyio.lowlevel.checkpoint()
        return bytes(most)


class FileSource:
    """A file, read as it is when it is read."""

    is_tty = False

    def __init__(self, node: RegularFile) -> None:
        self._node = node
        self._at = 0

    async def read(self, most: int = PIPE_BYTES) -> bytes:
        """Read on."""
        await anyio.lowlevel.checkpoint()
        data = bytes(self._node.data[self._at : self._at + most])
        self._at += len(data)
        return data


class PipeSource:
    """The reading end of a pipe."""

    is_tty = False

    def __init__(self, pipe: BytePipe) -> None:
        self.pipe = pipe

    async def read(self, most: int = PIPE_BYTES) -> bytes:
        """Read what is there."""
        return await self.pipe.read(most)


class PipeSink(Sink):
    """The writing end of a pipe."""

    def __init__(self, pipe: BytePipe) -> None:
        super().__init__()
        self._pipe = pipe

    @override
    async def write(self, data: bytes) -> None:
        await self._pipe.write(data)

    @override
    def finish(self) -> None:
        self._pipe.close_writer()


class RingSink(Sink):
    """A command's captured output; writing never waits for a reader."""

    def __init__(self, ring: Ring, on_finish: Callable[[], None]) -> None:
        super().__init__()
        self.ring = ring
        self._on_finish = on_finish

    @override
    async def write(self, data: bytes) -> None:
        if not self.ring.closed:
            self.ring.write(data)
        await anyio.lowlevel.checkpoint()

    @override
    def finish(self) -> None:
        self._on_finish()


class TerminalSink(RingSink):
    """A terminal's output: line feeds become carriage return and line feed."""

    is_tty = True

    @override
    async def write(self, data: bytes) -> None:
        await super().write(data.replace(b"\n", b"\r\n"))


class FileSink(Sink):
    """A file opened by `>` or `>>`."""

    def __init__(self, fs: FileSystem, node: RegularFile, place: Place) -> None:
        super().__init__()
        self._fs = fs
        self._node = node
        self._place = place

    @override
    async def write(self, data: bytes) -> None:
        self._node.data += data
        self._node.mtime = self._fs.now()
        self._fs.emit(self._place.path, "write")
        await anyio.lowlevel.checkpoint()


class DeviceSink(Sink):
    """A character device."""

    def __init__(self, node: Device) -> None:
        super().__init__()
        self._full = node.name == "full"

    @override
    async def write(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self._full:
            raise BrokenPipe
