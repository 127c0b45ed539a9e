"""Starting a helper process from a threaded program: posix_spawn, never fork.

The child gets exactly the descriptors named and is held by a pidfd.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsec.linux import pidfd


@dataclass(frozen=True)
class Child:
    """A process started here; `reap` must be called once."""

    pid: int
    descriptor: int

    def reap(self, patience_s: float = 5.0) -> int:
        """Wait for its end, killing it if that takes too long; returns the raw status. Blocks."""
        if not pidfd.wait_end(self.descriptor, patience_s):
            pidfd.kill(self.descriptor)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.descriptor)
        return status


def spawn(
    argv: Sequence[str], descriptors: Mapping[int, int], env: Mapping[str, str] | None = None
) -> Child:
    """Start a program in a session of its own.

    Args:
        argv: path and arguments.
        descriptors: number in the child -> descriptor here; 0 is /dev/null, 1 and 2 stay.
        env: its environment; None = a plain PATH.

    Raises:
        OSError: it cannot be started.
    """
    null = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
    with _out_of_the_way(descriptors) as copies:
        moves = [(os.POSIX_SPAWN_DUP2, here, there) for there, here in copies.items()]
        try:
            pid = os.posix_spawn(
                argv[0],
                list(argv),
                dict(env) if env is not None else {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                file_actions=[null, *moves],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
            )
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, argv[0]) from exc
    try:
        return Child(pid, os.pidfd_open(pid))
    except OSError:
        # Nobody could hold it: it must not go on, nor stay as a zombie.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


@contextlib.contextmanager
def _out_of_the_way(descriptors: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Copies with numbers above all that the child gets: none is overwritten before it is moved."""
    first = max((2, *descriptors)) + 1
    copies: dict[int, int] = {}
    try:
        for there, here in descriptors.items():
            copies[there] = fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, first)
        yield copies
    finally:
        for copy in copies.values():
            os.close(copy)
