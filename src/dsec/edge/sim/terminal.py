"""A line discipline: what lies between the keys a caller sends and the program that reads them."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable

from dsec.edge.sim.pipes import PIPE_BYTES, Changed
from dsec.edge.sim.rings import Ring
from dsec.wire.sandbox import PtySize

INTERRUPT, END, ERASE, QUIT = 0x03, 0x04, 0x7F, 0x1C


class Terminal:
    """Echo, lines, Ctrl-C, Ctrl-D and size; output goes to a ring by `TerminalSink`."""

    is_tty = True

    def __init__(self, size: PtySize, ring: Ring, to_group: Callable[[int], None]) -> None:
        self.size = size
        self._ring = ring
        self._to_group = to_group
        self._line = bytearray()
        self._ready: deque[bytes] = deque()
        self._changed = Changed()
        self._hung_up = False

    def feed(self, data: bytes) -> None:
        """Take keys."""
        for key in data:
            self._key(key)
        self._changed.notify()

    def _key(self, key: int) -> None:
        if key in (INTERRUPT, QUIT):
            self._ring.write(b"^C" if key == INTERRUPT else b"^\\")
            self._line.clear()
            self._to_group(signal.SIGINT if key == INTERRUPT else signal.SIGQUIT)
        elif key == END:
            self._flush()  # an empty line is what a reader sees as the end
        elif key == ERASE:
            if self._line:
                self._line.pop()
                self._ring.write(b"\b \b")
        elif key in b"\r\n":
            self._ring.write(b"\r\n")
            self._line += b"\n"
            self._flush()
        else:
            self._ring.write(bytes([key]))
            self._line.append(key)

    def _flush(self) -> None:
        self._ready.append(bytes(self._line))
        self._line.clear()

    async def read(self, most: int = PIPE_BYTES) -> bytes:
        """Wait for a line; empty = Ctrl-D on an empty line, or hung up."""
        while not self._ready and not self._hung_up:
            await self._changed.wait()
        if not self._ready:
            return b""
        line = self._ready.popleft()
        if len(line) > most:
            self._ready.appendleft(line[most:])
        return line[:most]

    def resize(self, size: PtySize) -> None:
        """Change the size and tell the program."""
        self.size = size
        self._to_group(signal.SIGWINCH)

    def hang_up(self) -> None:
        """Nobody will type any more."""
        self._hung_up = True
        self._changed.notify()
