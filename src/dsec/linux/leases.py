"""Whether anybody can be writing into a file, asked of the kernel by way of a lease."""

from __future__ import annotations

import fcntl
import signal


def has_writer(file: int) -> bool:
    """Whether somebody has a file open for writing, or mapped so that stores go into it.

    The kernel counts those, and gives a lease for reading only if there are none. A call that writes
    has its file open until it ends, also if the descriptor is closed meanwhile. True as well where
    it cannot be known: the file system has no leases, or the file's owner is another and this process
    may not lease (CAP_LEASE).

    Who opens the file for writing just then waits for the microseconds until the lease is let go.

    Args:
        file: open for reading only.
    """
    try:
        # Of such an open the kernel tells by SIGIO, which kills; this one is ignored by default.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return True
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
