"""One server per directory: a lock that also says who holds it and where it listens."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from dsec.base.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound

LOCK = "lock"
RUN_LOCK = "run.lock"
"""Not the same name: one directory may be used for both."""


class Holder(msgspec.Struct, kw_only=True):
    """The process that holds a state directory."""

    pid: int
    url: str = ""


class HeldDirs:
    """Directories of our own until we end."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def take(self, descriptor: int) -> None:
        """Make a locked file ours."""
        self._descriptors.append(descriptor)
        self.announce("")

    def announce(self, url: str) -> None:
        """Write down who we are and where we listen."""
        line = msgspec.json.encode(Holder(pid=os.getpid(), url=url)) + b"\n"
        for descriptor in self._descriptors:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, line, 0)


@contextmanager
def hold(state: Path, run: Path | None = None) -> Iterator[HeldDirs]:
    """Make a server's directories if need be, and keep them from any other server.

    The run directory too: an edge clears away what it finds there.

    Args:
        state: the state directory.
        run: the run directory, of processes that have one.

    Raises:
        Conflict: another server holds one of them.
        InvalidRequest: one cannot be made or written.
    """
    held = HeldDirs()
    with ExitStack() as stack:
        held.take(stack.enter_context(_locked(state, LOCK, "--state-dir")))
        if run is not None:
            held.take(stack.enter_context(_locked(run, RUN_LOCK, "--run-dir")))
        yield held


@contextmanager
def _locked(path: Path, lock: str, flag: str) -> Iterator[int]:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path / lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise InvalidRequest(
            f"cannot use directory {path}: {exc.strerror}; name another with {flag}"
        ) from exc
    try:
        _lock(descriptor, path, flag)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, flag: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = _read(descriptor)
        who = f"process {other.pid} {other.url}".strip() if other else "another server"
        raise Conflict(f"{path} is in use by {who}; name another with {flag}") from None


def holder_of(path: Path) -> Holder | None:
    """The process that holds a state directory now; None if none does."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    finally:
        os.close(descriptor)
    return None


def stop_holder(path: Path, timeout_s: float) -> Holder:
    """Ask the server of a state directory to end, and wait until it has.

    Raises:
        NotFound: none runs. DeadlineExceeded: it is still there.
    """
    holder = holder_of(path)
    if holder is None:
        raise NotFound(f"no server uses {path}", kind="server")
    # A descriptor of the process, so that the signal cannot reach a later one with its number.
    process = os.pidfd_open(holder.pid)
    try:
        if holder_of(path) != holder:
            raise NotFound(f"no server uses {path}", kind="server")
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not _ended(process, timeout_s):
            raise DeadlineExceeded(f"process {holder.pid} still runs after {timeout_s:.0f} s")
    finally:
        os.close(process)
    return holder


def _ended(process: int, timeout_s: float) -> bool:
    import select

    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _read(descriptor: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder)
    except msgspec.MsgspecError:
        return None
