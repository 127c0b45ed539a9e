"""fanotify's group as a keeper has it: together with an anchor (`anchor.py`), which outlives it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import dsec
from dsec.base.errors import Unavailable
from dsec.images.lazy import anchor
from dsec.linux import fanotify
from dsec.linux.spawn import Child, spawn

logger = logging.getLogger("dsec.filler.keeper")

ANCHOR = (sys.executable, "-m", "dsec.images.lazy.anchor")
_PATIENCE_S = 5.0
"""How long an anchor may take to hand over its group: it waits for the last worker's end."""


class AnchoredGroup:
    """A group, and the connection by which its anchor knows that somebody serves it."""

    def __init__(self, socket_path: Path, cache: Path) -> None:
        """Take over the group of a keeper that is gone, or open one.

        Args:
            socket_path: where an anchor listens.
            cache: directory of the files.

        Raises:
            OSError: the host has no such groups.
            Unavailable: the last keeper's worker has not ended yet.
        """
        self._path = socket_path
        self._cache = cache
        self._child: Child | None = None
        taken = _take_over(socket_path)
        self.inherited = taken is not None
        """Whether it is the last keeper's: what is mounted is as good as before."""
        if taken is not None:
            self.descriptor, self._connection = taken
            return
        self.descriptor = fanotify.open_group()
        try:
            self._connection = self._start_anchor()
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def connection(self) -> int:
        """For the worker to have open: while it lives, the anchor must not answer."""
        return self._connection.fileno()

    def renew_anchor(self) -> bool:
        """Start another anchor if it is gone; then the worker must get the new connection."""
        if not self._is_anchor_gone():
            return False
        logger.error("the anchor is gone: starting another")
        self._connection.close()
        self._reap()
        self._connection = self._start_anchor()
        return True

    def close(self) -> None:
        """Leave it to the anchor."""
        if self._child is not None:
            os.close(self._child.descriptor)
        os.close(self.descriptor)
        self._connection.close()

    def _is_anchor_gone(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return not self._connection.recv(1, socket.MSG_DONTWAIT)
        return False

    def _reap(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.reap()

    def _start_anchor(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, _listening(self._path) as listener:
            # From here on it has them, before it runs its first line.
            handed = {
                anchor.GROUP: self.descriptor,
                anchor.LISTENER: listener.fileno(),
                anchor.CONNECTION: theirs.fileno(),
            }
            try:
                self._child = spawn([*ANCHOR, str(self._cache)], handed, _environment())
            except BaseException:
                ours.close()
                raise
        return ours


def _environment() -> dict[str, str]:
    """Where the package is, and nothing else: what the keeper has holds the store's credentials."""
    return {"PYTHONPATH": str(Path(dsec.__path__[0]).parent)}


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """For root only: the keeper's umask closes it. A name that is there is a dead anchor's."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


def _take_over(path: Path) -> tuple[int, socket.socket] | None:
    """Group and connection of an anchor without keeper; None if there is no anchor."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_PATIENCE_S)
        connection.connect(str(path))
        _, groups, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if groups:
            connection.setblocking(True)
            return groups[0], connection
    except (FileNotFoundError, ConnectionError):
        pass
    except TimeoutError:
        connection.close()
        raise Unavailable("the worker of a keeper that is gone has not ended yet") from None
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


def is_anchored(path: Path) -> bool:
    """Whether an anchor holds a group, with a keeper or without."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionError):
            return False
    return True
