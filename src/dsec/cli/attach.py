"""A command in a sandbox joined to this process: its output, its input, its signals, its terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import anyio
import anyio.abc

from dsec.base.errors import Conflict, DsecError, InvalidRequest, NotFound, Unavailable
from dsec.cli.boundary import Interrupted
from dsec.cli.output import note
from dsec.sdk import Command
from dsec.wire.sandbox import CommandView, Exited, Gap, Output, PtySize

INPUT_BYTES = 64 << 10
ESCAPE = b"~."
_NEWLINES = frozenset(b"\r\n")


class Detached(Exception):
    """The user has left; the command goes on."""


def terminal_size() -> PtySize:
    """The size of this terminal."""
    try:
        size = os.get_terminal_size(sys.stdin.fileno())
    except (OSError, ValueError):
        return PtySize()
    return PtySize(max(size.lines, 1), max(size.columns, 1))


def need_terminal() -> None:
    """See that there is a terminal.

    Raises:
        InvalidRequest: there is none.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest("-t needs a terminal on standard input and output")


async def attach(command: Command, *, stdin: bool, pty: bool) -> int:
    """Join a command and this process until it ends.

    Args:
        command: just started.
        stdin: send our standard input to it.
        pty: it has a terminal: ours turns raw, and tells it its size.

    Returns:
        Its exit status.

    Raises:
        Detached: the user typed the escape.
        Interrupted: the user, or the terminal's end, has had it killed.
    """
    joined = _Joined(command, pty=pty)
    try:
        with _raw() if pty else _as_it_is():
            view = await joined.run(stdin=stdin)
    except* Detached:
        raise Detached from None
    except* Interrupted:
        raise Interrupted from None
    return exit_status(view)


def exit_status(view: CommandView) -> int:
    """What we exit with, and a word on standard error if it is not the command's own doing."""
    if view.timed_out:
        note(f"error: timed out after {round(view.duration_s, 1):g} s; killed")
    elif view.oom_killed:
        note("error: killed for want of memory")
    elif view.data_unavailable and view.exit_code:
        note("error: parts of its environment could not be read; see `dsec store show`")
    return view.exit_code if view.exit_code is not None else 1


class _Joined:
    def __init__(self, command: Command, *, pty: bool) -> None:
        self._command = command
        self._pty = pty
        self._interrupts = 0

    async def run(self, *, stdin: bool) -> CommandView:
        """Until the command ends."""
        async with anyio.create_task_group() as group:
            await group.start(self._signals)
            if stdin:
                group.start_soon(self._input)
            view = await self._output()
            group.cancel_scope.cancel()
        return view

    async def _output(self) -> CommandView:
        async with self._command.events() as events:
            async for event in events:
                match event:
                    case Output():
                        await self._show(event)
                    case Gap():
                        note(f"[... {event.dropped_bytes} bytes of {event.stream} left out ...]")
                    case Exited():
                        return event.command
                    case _:
                        pass
        raise Unavailable("the command's events ended before it did")

    async def _show(self, event: Output) -> None:
        stream = sys.stdout if event.stream == "stdout" else sys.stderr
        try:
            stream.buffer.write(event.data)
            stream.buffer.flush()
        except BrokenPipeError:
            # As if it had written there itself.
            with anyio.CancelScope(shield=True), anyio.move_on_after(5), suppress(DsecError):
                await self._command.kill()
            raise

    async def _input(self) -> None:
        escape = Escape()
        while data := await _read_input():
            if self._pty and escape.typed(data):
                raise Detached
            if not await self._write(data):
                return
        if not self._pty:
            with suppress(Conflict, NotFound):
                await self._command.close_stdin()

    async def _write(self, data: bytes) -> bool:
        try:
            await self._command.write(data)
        except (Conflict, NotFound):
            return False  # it has ended, or reads no more
        except Unavailable:
            # At a terminal a key that got lost is typed again; anything else must not lose bytes.
            if not self._pty:
                raise
        return True

    async def _signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH]
        with anyio.open_signal_receiver(*wanted) as received:
            task_status.started()
            async for number in received:
                await self._on_signal(number)

    async def _on_signal(self, number: signal.Signals) -> None:
        with suppress(DsecError):
            if number == signal.SIGWINCH:
                if self._pty:
                    size = terminal_size()
                    await self._command.resize(size.rows, size.cols)
                return
            self._interrupts += 1
            if number == signal.SIGINT and self._interrupts == 1:
                await self._command.signal("INT")
                return
            with anyio.move_on_after(5):
                await self._command.kill()
        raise Interrupted


class Escape:
    """Finds `~.` typed at the start of a line, as in ssh."""

    def __init__(self) -> None:
        self._line = b""

    def typed(self, data: bytes) -> bool:
        """Take what was typed; whether it was the escape."""
        for byte in data:
            if byte in _NEWLINES:
                self._line = b""
            elif len(self._line) <= len(ESCAPE):
                self._line += bytes([byte])
            if self._line == ESCAPE:
                return True
        return False


async def _read_input() -> bytes:
    descriptor = sys.stdin.fileno()
    # Files and /dev/null cannot be waited for, and need not be.
    with suppress(OSError):
        await anyio.wait_readable(descriptor)
    return os.read(descriptor, INPUT_BYTES)


@contextmanager
def _raw() -> Iterator[None]:
    """This terminal raw, and as it was at the end, whatever happens."""
    import termios  # not everywhere, and only here
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


async def replay(command: Command, write: Callable[[Output], None]) -> None:
    """What a command has said so far, and no waiting for more."""
    total = {"stdout": command.view.stdout_bytes, "stderr": command.view.stderr_bytes}
    seen = {"stdout": 0, "stderr": 0}
    if not any(total.values()):
        return
    async with command.events() as events:
        async for event in events:
            match event:
                case Output():
                    write(event)
                    seen[event.stream] = event.offset + len(event.data)
                case Gap():
                    seen[event.stream] = event.offset
                case _:
                    pass
            if all(seen[name] >= total[name] for name in total):
                return
