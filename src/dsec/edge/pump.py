"""For connections that must be read: a task that reads and one that writes."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.abc import ByteStream


class Pump:
    """Moves bytes of a stream that cannot call back (pipes in memory, the simulation)."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._pending: list[bytes] = []
        self._wake = anyio.Event()
        self._closed = False

    def write(self, data: bytes) -> None:
        """Queue bytes; empty ones close the stream after what was queued."""
        self._closed |= not data
        self._pending.append(data)
        self._wake.set()

    async def run_writer(self) -> None:
        """Write what is queued, as one piece."""
        try:
            while not self._closed:
                if not self._pending:
                    await self._wake.wait()
                    self._wake = anyio.Event()
                pending, self._pending = self._pending, []
                if data := b"".join(pending):
                    await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # the reader says so
        finally:
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()

    async def run_reader(
        self, on_data: Callable[[bytes], None], on_lost: Callable[[], None]
    ) -> None:
        """Hand over what comes until the end."""
        try:
            while True:
                on_data(await self._stream.receive())
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass
        self.write(b"")
        on_lost()
