"""The process that has fanotify's group too, so that it is not closed while anything needs it.

`python -m dsec.images.lazy.anchor CACHE`, started by a keeper with the group, a listening socket
and a connection. As long as keeper or worker have the connection's other end, it does nothing. When
both are gone, however they went, it denies every read: those that wait, and all that come, since
the kernel would let them through to zeros. The next keeper connects and gets the group, and
everything that is mounted goes on. Without one it ends when nobody has a file of the group open.

It ignores signals. To kill it together with keeper and worker is to lose the group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys

from dsec.base.clock import Clock, SystemClock
from dsec.linux import fanotify

GROUP, LISTENER, CONNECTION = 3, 4, 5
"""Descriptors it is started with."""
LOOK_EVERY_S = 1.0
"""How often it looks whether it is needed, while it denies."""


class Anchor:
    """Single-threaded and blocking."""

    def __init__(self, group: int, listener: socket.socket, cache: int, clock: Clock) -> None:
        """Hold a group.

        Args:
            group: not blocking.
            listener: where the next keeper connects.
            cache: a descriptor of the directory with the files.
            clock: for the pauses between looks.
        """
        self._group = group
        self._listener = listener
        self._cache = cache
        self._clock = clock

    def run(self, connection: socket.socket) -> None:
        """Return when nobody needs it; the group may be closed then.

        Args:
            connection: to the keeper that started it.
        """
        keeper: socket.socket | None = connection
        while keeper is not None:
            _wait_end(keeper)
            keeper = self._stand_in() if self._is_needed() else None

    def _is_needed(self) -> bool:
        with contextlib.suppress(OSError):
            return fanotify.is_in_use(self._group, self._cache)
        return True  # who cannot look must not let go

    def _stand_in(self) -> socket.socket | None:
        """Deny until the next keeper comes, or return None when there is nothing left to keep."""
        # With worker and keeper gone, nobody else answers what they had taken.
        fanotify.deny_unanswered(self._group)
        while self._is_needed():
            look_at = self._clock.monotonic() + LOOK_EVERY_S
            while (rest_s := look_at - self._clock.monotonic()) > 0:
                if keeper := self._next_keeper():
                    return keeper
                self._deny(rest_s)
        return None

    def _next_keeper(self) -> socket.socket | None:
        with contextlib.suppress(OSError):  # nobody, or gone again
            connection, _ = self._listener.accept()
            try:
                socket.send_fds(connection, [b"+"], [self._group])
            except OSError:
                connection.close()
                raise
            return connection
        return None

    def _deny(self, timeout_s: float) -> None:
        """Deny what there is, after waiting for it or for a keeper."""
        poller = select.poll()
        poller.register(self._group, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        poller.poll(timeout_s * 1000)
        with contextlib.suppress(OSError):  # what the kernel could not hand over it has denied
            for event in fanotify.read_events(self._group):
                fanotify.deny(self._group, event.descriptor)
                os.close(event.descriptor)


def _wait_end(connection: socket.socket) -> None:
    connection.setblocking(True)
    with connection, contextlib.suppress(ConnectionError):
        while connection.recv(1):
            pass


def main(cache: str) -> int:
    """The process; its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.umask(0o077)
    os.chdir("/")
    listener = socket.socket(fileno=LISTENER)
    listener.setblocking(False)
    path = listener.getsockname()
    directory = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    Anchor(GROUP, listener, directory, SystemClock()).run(socket.socket(fileno=CONNECTION))
    # Before the listener goes: a keeper that finds nobody here makes another socket of that name.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - no need for pathlib here
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
