"""Simulated TCP: listeners of processes, reached by port number."""

from __future__ import annotations

import errno
import os

from dsec.edge.sim.pipes import Mailbox, MemoryStream, memory_pair


class Ports:
    """Which process listens on which port."""

    def __init__(self) -> None:
        self._listeners: dict[int, tuple[int, Mailbox[MemoryStream]]] = {}

    def listen(self, pid: int, port: int) -> Mailbox[MemoryStream]:
        """Listen; what is received are the accepted connections.

        Raises:
            OSError: EADDRINUSE.
        """
        if port in self._listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        backlog: Mailbox[MemoryStream] = Mailbox()
        self._listeners[port] = pid, backlog
        return backlog

    def connect(self, port: int) -> MemoryStream:
        """Connect to a listener.

        Raises:
            OSError: ECONNREFUSED, nobody listens there.
        """
        if port not in self._listeners:
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        near, far = memory_pair()
        self._listeners[port][1].put(far)
        return near

    def drop_all(self, pid: int) -> None:
        """Close the listeners of a process that has ended."""
        for port, (owner, backlog) in list(self._listeners.items()):
            if owner == pid:
                backlog.close()
                del self._listeners[port]
