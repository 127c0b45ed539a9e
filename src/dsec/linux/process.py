"""Programs of the host: started without a shell, output bounded, never left behind.

Each runs in a session of its own, so that a cancelled or late one is killed with its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import anyio
from anyio.abc import ByteReceiveStream, Process

from dsec.linux import pidfd

STDERR_LIMIT = 16 * 1024
STDOUT_LIMIT = 16 * 1024 * 1024
_CHUNK = 64 * 1024
_PR_SET_PDEATHSIG = 1
_DRAIN_S = 5.0
"""What holds a program's output after its group was killed (it left the session) is not waited for."""

LineSink = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Completed:
    """A program that exited 0."""

    argv: tuple[str, ...]
    stdout: bytes
    stderr: str
    """The last 16 KiB."""


class CommandFailed(Exception):
    """A program ended badly; the message has the whole command, ready to be copied."""

    def __init__(
        self,
        argv: Sequence[str],
        status: int | None,
        stderr: str,
        reason: str = "",
        stdout: str = "",
    ) -> None:
        self.argv = tuple(argv)
        self.status = status
        """Exit status, minus the signal's number, or None after a timeout."""
        self.stderr = stderr
        self.stdout = stdout
        self.reason = reason or _describe(status)
        said = f": {stderr.strip()}" if stderr.strip() else ""
        super().__init__(f"`{shlex.join(argv)}` {self.reason}{said}")


def _describe(status: int | None) -> str:
    if status is None:
        return "did not end"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited {status}"


class _Kept:
    """What is kept of one output: its first bytes, or its last."""

    def __init__(self, limit: int, *, last: bool, on_line: LineSink | None = None) -> None:
        self.data = bytearray()
        self.overflowed = False
        self._limit = limit
        self._last = last
        self._on_line = on_line
        self._line = b""

    def feed(self, chunk: bytes) -> None:
        self.data += chunk
        if len(self.data) > self._limit:
            self.overflowed = True
            del self.data[slice(0, -self._limit) if self._last else slice(self._limit, None)]
        if self._on_line is not None:
            self._feed_lines(chunk, self._on_line)

    def _feed_lines(self, chunk: bytes, sink: LineSink) -> None:
        *lines, self._line = (self._line + chunk).replace(b"\r", b"\n").split(b"\n")
        self._line = self._line[-_CHUNK:]
        for line in lines:
            if line:
                sink(line.decode("utf-8", "replace"))

    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it dies, however it dies.

    Args:
        parent: the process that must still be there.

    Raises:
        OSError: the kernel refused.
        ProcessLookupError: the parent is gone already.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl PR_SET_PDEATHSIG: {os.strerror(number)}")
    if os.getppid() != parent:
        raise ProcessLookupError(f"process {parent}, which started this one, is gone")


def _outcome(argv: Sequence[str], status: int, out: _Kept, err: _Kept) -> Completed:
    if status != 0:
        raise CommandFailed(argv, status, err.text(), stdout=out.text()[-STDERR_LIMIT:])
    if out.overflowed:
        raise CommandFailed(argv, status, "", "wrote more to standard output than is kept")
    return Completed(tuple(argv), bytes(out.data), err.text())


def _kill_group(pid: int) -> None:
    """Kill a program and whatever it started; after its own end, what it left behind.

    Once, and before it is reaped or at once after: the number stays its group's while that has
    members, and may be anybody's when it has none.
    """
    # PermissionError: what is left has become another user's, and this is not root.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end(child: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Wait for a program's end, then kill all it left; its status, None if it was killed as late."""
    with pidfd.opened(child.pid) as descriptor:
        late = descriptor is not None and not pidfd.wait_end(descriptor, timeout_s)
    _kill_group(child.pid)
    status = child.wait()
    return None if late else status


def _drain(stream: IO[bytes], kept: _Kept) -> None:
    with stream:
        while chunk := stream.read1(_CHUNK):  # type: ignore[attr-defined]
            kept.feed(chunk)


def _feed(stream: IO[bytes], data: bytes) -> None:
    try:
        with stream:
            stream.write(data)
    except BrokenPipeError:
        return  # it ended without reading all; its exit status tells the rest


def run(
    argv: Sequence[str],
    *,
    stdin: bytes | None = None,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a program to its end, from a worker thread.

    Raises:
        CommandFailed: it exited non-zero, was killed, or ran longer than `timeout_s`.
        FileNotFoundError: there is no such program.
    """
    child = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if env is None else dict(env),
        cwd=cwd,
        start_new_session=True,
    )
    out, err = _Kept(STDOUT_LIMIT, last=False), _Kept(STDERR_LIMIT, last=True)
    threads = [
        threading.Thread(target=_drain, args=(child.stdout, out), daemon=True),
        threading.Thread(target=_drain, args=(child.stderr, err), daemon=True),
    ]
    if stdin is not None:
        threads.append(threading.Thread(target=_feed, args=(child.stdin, stdin), daemon=True))
    try:
        for thread in threads:
            thread.start()
        status = _end(child, timeout_s)
    except BaseException:
        if child.returncode is None:
            _kill_group(child.pid)
            child.wait()
        raise
    finally:
        _join(threads)
    if status is None:
        raise CommandFailed(argv, None, err.text(), f"took longer than {timeout_s:g} s")
    return _outcome(argv, status, out, err)


def _join(threads: Sequence[threading.Thread]) -> None:
    until = time.monotonic() + _DRAIN_S
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, until - time.monotonic()))


async def run_async(  # noqa: PLR0913 - each is a thing a caller may say
    argv: Sequence[str],
    *,
    stdin: bytes | None = None,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_stdout_line: LineSink | None = None,
    on_stderr_line: LineSink | None = None,
) -> Completed:
    """Run a program to its end without a thread; cancelling kills it and its children.

    Args:
        argv: the program and its arguments.
        stdin: what it reads; nothing if not given.
        timeout_s: when to kill it.
        env: its whole environment; this process's own if not given.
        cwd: where it runs.
        on_stdout_line: called with each line as it comes (a carriage return ends one too).
        on_stderr_line: likewise.

    Raises:
        CommandFailed: it exited non-zero, was killed, or ran longer than `timeout_s`.
        FileNotFoundError: there is no such program.
    """
    out = _Kept(STDOUT_LIMIT, last=on_stdout_line is not None, on_line=on_stdout_line)
    err = _Kept(STDERR_LIMIT, last=True, on_line=on_stderr_line)
    child = await anyio.open_process(
        list(argv),
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        env=None if env is None else dict(env),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        with anyio.fail_after(timeout_s):
            await _converse(child, stdin, out, err)
    except TimeoutError:
        raise CommandFailed(argv, None, err.text(), f"took longer than {timeout_s:g} s") from None
    finally:
        await _bury(child)
    if on_stdout_line is not None:
        out.overflowed = False  # the lines were taken as they came
    return _outcome(argv, child.returncode or 0, out, err)


async def _converse(child: Process, stdin: bytes | None, out: _Kept, err: _Kept) -> None:
    async with anyio.create_task_group() as tasks:
        if child.stdout is not None:
            tasks.start_soon(_drain_async, child.stdout, out)
        if child.stderr is not None:
            tasks.start_soon(_drain_async, child.stderr, err)
        if stdin is not None:
            tasks.start_soon(_feed_async, child, stdin)
        try:
            await child.wait()
        finally:
            _kill_group(child.pid)  # what it left behind would keep the output open
        tasks.cancel_scope.deadline = anyio.current_time() + _DRAIN_S


async def _drain_async(stream: ByteReceiveStream, kept: _Kept) -> None:
    async for chunk in stream:
        kept.feed(chunk)


async def _feed_async(child: Process, data: bytes) -> None:
    if child.stdin is None:
        return
    try:
        await child.stdin.send(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass  # it ended without reading all; its exit status tells the rest
    finally:
        await child.stdin.aclose()


async def _bury(child: Process) -> None:
    with anyio.CancelScope(shield=True):
        await child.aclose()  # `_converse` has killed it, however that ended


class Filter:
    """A program that turns one byte stream into another, such as `zstd -dc`.

    Use as a context manager: `output` is read to its end inside; leaving kills a program still
    running.
    """

    def __init__(self, argv: Sequence[str], source: IO[bytes]) -> None:
        """Start it.

        Raises:
            FileNotFoundError: there is no such program.
        """
        self._argv = tuple(argv)
        self._source = source
        self._err = _Kept(STDERR_LIMIT, last=True)
        self._child = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=self._pump, daemon=True),
            threading.Thread(target=_drain, args=(self._child.stderr, self._err), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _pump(self) -> None:
        stream = self._child.stdin
        if stream is None:
            return
        try:
            with stream:
                while chunk := self._source.read(1 << 20):
                    stream.write(chunk)
        except BrokenPipeError:
            return

    @property
    def output(self) -> IO[bytes]:
        """What it writes."""
        if self._child.stdout is None:
            raise ValueError("the filter has no output")
        return self._child.stdout

    def finish(self) -> None:
        """Check, after `output` was read to its end, that the program was content.

        Raises:
            CommandFailed: it exited non-zero or was killed.
        """
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        status = self._end()
        _join(self._threads)
        if status != 0:
            raise CommandFailed(self._argv, status, self._err.text())

    def _end(self) -> int:
        if self._child.returncode is None:
            _kill_group(self._child.pid)
        return self._child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.output.close()
        _join(self._threads)
