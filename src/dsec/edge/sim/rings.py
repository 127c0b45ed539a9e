"""What is kept of one output stream: its first half and its last half."""

from __future__ import annotations

from dsec.edge.sim.pipes import Changed


class Ring:
    """Takes any amount without ever blocking; holds at most `limit` bytes."""

    def __init__(self, limit: int, changed: Changed | None = None) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        self.closed = False
        self.changed = changed or Changed()

    def write(self, data: bytes) -> None:
        """Take bytes."""
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            del self._tail[:excess]
        self.total += len(data)
        self.changed.notify()

    def close(self) -> None:
        """No more will come."""
        self.closed = True
        self.changed.notify()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return len(self._head) + len(self._tail)

    def release(self) -> None:
        """Give up what is held; `dropped_bytes` will say so."""
        self._head.clear()
        self._tail.clear()

    def captured(self) -> dict[str, object]:
        """Head, tail and how much is missing between them."""
        return {"head": bytes(self._head), "tail": bytes(self._tail), **self._dropped()}

    def lengths(self) -> dict[str, object]:
        """The same without the bytes, which go ahead of it as data."""
        return {
            "head_bytes": len(self._head),
            "tail_bytes": len(self._tail),
            **self._dropped(),
        }

    def kept(self) -> bytes:
        """Head and tail in one piece."""
        return bytes(self._head + self._tail)

    def _dropped(self) -> dict[str, object]:
        return {"dropped_bytes": self.total - self.held}

    def read_from(self, offset: int, most: int) -> tuple[int, bytes]:
        """Bytes from `offset`, or from the next offset still held, and that offset."""
        if offset < len(self._head):
            return offset, bytes(self._head[offset : offset + most])
        start = self.total - len(self._tail)
        offset = min(max(offset, start), self.total)
        return offset, bytes(self._tail[offset - start : offset - start + most])
