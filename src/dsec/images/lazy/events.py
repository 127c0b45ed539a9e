"""Events to whoever listens; one who does not keep up is cut off and comes again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from dsec.wire.filler import DataEvent

_AHEAD = 1024


class Events:
    """The listeners of one filler."""

    def __init__(self) -> None:
        self._listeners: set[MemoryObjectSendStream[DataEvent]] = set()

    def tell(self, event: DataEvent) -> None:
        """Send to all; never waits."""
        for listener in list(self._listeners):
            try:
                listener.send_nowait(event)
            except anyio.WouldBlock:
                listener.close()
                self._listeners.discard(listener)

    @contextmanager
    def listening(self) -> Iterator[AsyncIterator[DataEvent]]:
        """What comes from now on; it ends for one who is `_AHEAD` events late."""
        send, receive = anyio.create_memory_object_stream[DataEvent](_AHEAD)
        self._listeners.add(send)
        try:
            with send, receive:
                yield receive
        finally:
            self._listeners.discard(send)
