"""Processes by descriptor: a number may be reused, a descriptor means one process for ever."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def opened(pid: int) -> Iterator[int | None]:
    """A descriptor of a process, or None if it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def kill(descriptor: int) -> bool:
    """Kill it; False if it has ended already."""
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def wait_end(descriptor: int, timeout_s: float) -> bool:
    """Wait until the process has ended; False if it has not in time. Blocks."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
