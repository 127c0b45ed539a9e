"""Command, session and port methods of the protocol."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import anyio
import msgspec

from dsec.edge.sim.commands import Command, Commands
from dsec.edge.sim.errors import AetherError, invalid, not_found
from dsec.edge.sim.pipes import MemoryStream
from dsec.edge.sim.processes import ProcessTable
from dsec.edge.sim.sessions import Sessions
from dsec.edge.sim.terminal import Terminal
from dsec.edge.sim.wire import CHUNK, Stream
from dsec.kit.generators import generator_of
from dsec.wire.frames import Channel
from dsec.wire.sandbox import CommandSpec, PtySize, SessionSpec

T = TypeVar("T", bound=msgspec.Struct)
STREAMS = ((Channel.STDOUT, "stdout"), (Channel.STDERR, "stderr"))
T2 = TypeVar("T2")
INLINE_BYTES = 256 * 1024
PART_ITEMS = 256
Arguments = Mapping[str, Any]
PATHS = frozenset({"path", "to"})
"""Arguments that are bytes, though text is accepted."""


def decode(arguments: Arguments, shape: type[T]) -> T:
    """Arguments as a struct; keys it does not know, and nil, are left out.

    Raises:
        msgspec.ValidationError: a value is wrong.
    """
    known = {field.name for field in msgspec.structs.fields(shape)}
    given = {k: v for k, v in arguments.items() if k in known and v is not None}
    for name in PATHS & given.keys():
        given[name] = os.fsencode(given[name])
    return msgspec.convert(given, shape)


async def in_parts(stream: Stream, items: list[T2]) -> list[T2]:
    """The end of a list; what would make the result too large goes ahead as events."""
    while len(items) > PART_ITEMS:
        await stream.event({"more": items[:PART_ITEMS]})
        items = items[PART_ITEMS:]
    return items


class CommandArgs(msgspec.Struct, kw_only=True):
    """Arguments that name a command."""

    command_id: str


class AttachArgs(CommandArgs, kw_only=True):
    """Arguments of `attach`."""

    stdout_from: int | None = None
    stderr_from: int | None = None


class StdinArgs(CommandArgs, kw_only=True):
    """Arguments of `stdin`."""

    eof: bool = False
    offset: int | None = None


class ResizeArgs(CommandArgs, kw_only=True):
    """Arguments of `resize`."""

    rows: int
    cols: int


class SignalArgs(CommandArgs, kw_only=True):
    """Arguments of `signal`."""

    signal: int


class ConnectArgs(msgspec.Struct, kw_only=True):
    """Arguments of `connect`."""

    port: int
    host: str = "127.0.0.1"


class CommandMethods:
    """What can be asked about commands, sessions and ports."""

    def __init__(self, commands: Commands, sessions: Sessions, table: ProcessTable) -> None:
        self._commands = commands
        self._sessions = sessions
        self._table = table

    def _begin(self, arguments: Arguments, data: bytes | None = None) -> Command:
        spec = decode(arguments, CommandSpec)
        if not spec.command_id:
            raise invalid("command_id is missing")
        if data is not None:
            spec.stdin = "pipe"
        return self._sessions.start(spec) if spec.session else self._commands.start(spec)

    def _named(self, arguments: Arguments) -> Command:
        return self._commands.find(decode(arguments, CommandArgs).command_id)

    async def start(self, _stream: Stream, arguments: Arguments) -> object:
        """`start`."""
        return as_map(self._begin(arguments))

    async def run(self, stream: Stream, arguments: Arguments) -> object:
        """`run`: start or find, feed, wait."""
        data = arguments.get("input")
        command = self._begin(arguments, data)
        async with anyio.create_task_group() as group:
            if data is not None:
                group.start_soon(_feed_all, command, bytes(data))
            await command.ended.wait()
            group.cancel_scope.cancel()
        return await _result(stream, command)

    async def wait(self, stream: Stream, arguments: Arguments) -> object:
        """`wait`."""
        command = self._named(arguments)
        await command.ended.wait()
        return await _result(stream, command)

    async def view(self, _stream: Stream, arguments: Arguments) -> object:
        """`view`."""
        return as_map(self._named(arguments))

    async def list(self, stream: Stream, _arguments: Arguments) -> object:
        """`list`."""
        return await in_parts(stream, [as_map(c) for c in self._commands.by_id.values()])

    async def attach(self, stream: Stream, arguments: Arguments) -> object:
        """`attach`: what it says, as fast as the reader takes it."""
        args = decode(arguments, AttachArgs)
        command = self._commands.find(args.command_id)
        rings = {Channel.STDOUT: command.stdout, Channel.STDERR: command.stderr}
        asked = {Channel.STDOUT: args.stdout_from, Channel.STDERR: args.stderr_from}
        at: dict[Channel, int] = {}
        for channel, ring in rings.items():
            offset = asked[channel]
            at[channel] = ring.total if offset is None else offset
        await stream.event({"started": as_map(command)})
        while True:
            behind = [c for c, ring in rings.items() if at[c] < ring.total]
            for channel in behind:
                at[channel] = await self._send_piece(stream, command, channel, at[channel])
            if behind:
                continue
            if not command.running:
                break
            await command.changed.wait()
        await stream.event({"exited": as_map(command)})
        return None

    async def _send_piece(
        self, stream: Stream, command: Command, channel: Channel, offset: int
    ) -> int:
        ring = command.stdout if channel == Channel.STDOUT else command.stderr
        room = await stream.room()
        start, data = ring.read_from(offset, min(room, CHUNK))
        if start > offset:
            gap = {"channel": int(channel), "offset": start, "dropped_bytes": start - offset}
            await stream.event({"gap": gap})
        if data:
            await stream.spend(data, channel)
        return start + len(data)

    async def stdin(self, stream: Stream, arguments: Arguments) -> object:
        """`stdin`: bytes for it, then perhaps the end. What it has taken before is skipped."""
        args = decode(arguments, StdinArgs)
        command = self._commands.find(args.command_id)
        skip = 0 if args.offset is None else command.fed - args.offset
        if skip < 0:
            raise AetherError("conflict", f"it has taken {command.fed} bytes", kind="offset")
        if command.stdin is None or not command.running:
            return await _repeated(stream, command, args, skip)
        written = 0
        async for data in stream.incoming():
            fresh, skip = data[skip:], max(0, skip - len(data))
            command.fed += len(fresh)
            await command.feed(fresh)
            written += len(fresh)
        if args.eof:
            command.end_input()
        return {"written": written}

    async def resize(self, _stream: Stream, arguments: Arguments) -> None:
        """`resize`."""
        args = decode(arguments, ResizeArgs)
        command = self._commands.find(args.command_id)
        if not isinstance(command.stdin, Terminal):
            raise AetherError("conflict", f"command {command.id} has no terminal")
        size = {"rows": args.rows, "cols": args.cols}
        command.stdin.resize(msgspec.convert(size, PtySize))

    async def signal(self, _stream: Stream, arguments: Arguments) -> None:
        """`signal`."""
        args = decode(arguments, SignalArgs)
        command = self._commands.find(args.command_id)
        if not command.running:
            raise not_found("command", f"command {command.id} has ended")
        if not 0 < args.signal < 65:
            raise invalid(f"no signal {args.signal}")
        command.signal(args.signal)

    async def kill(self, _stream: Stream, arguments: Arguments) -> object:
        """`kill`."""
        command = self._named(arguments)
        await self._commands.kill(command)
        return as_map(command)

    async def session_open(self, _stream: Stream, arguments: Arguments) -> object:
        """`session_open`."""
        spec = decode(arguments, SessionSpec)
        if not spec.session_id:
            raise invalid("session_id is missing")
        return msgspec.to_builtins(self._sessions.open(spec).view())

    async def session_close(self, _stream: Stream, arguments: Arguments) -> None:
        """`session_close`."""
        await self._sessions.close(self._sessions.find(str(arguments.get("session_id"))))

    async def session_list(self, _stream: Stream, _arguments: Arguments) -> object:
        """`session_list`."""
        views = [session.view() for session in self._sessions.by_id.values()]
        return msgspec.to_builtins(views)

    async def connect(self, stream: Stream, arguments: Arguments) -> None:
        """`connect`: bytes both ways until both directions have ended."""
        args = decode(arguments, ConnectArgs)
        try:
            near = self._table.ports.connect(args.port)
        except OSError as error:
            raise AetherError(
                "not_found",
                f"{args.host}:{args.port}: {error.strerror}",
                errno=error.errno or 0,
                kind="port",
            ) from None
        try:
            await stream.event({"connected": True})
            async with anyio.create_task_group() as group:
                group.start_soon(_inward, stream, near)
                await _outward(stream, near)
        finally:
            near.abort()


async def _repeated(stream: Stream, command: Command, args: StdinArgs, skip: int) -> object:
    """To one that takes no more, what it has taken may be said again."""
    if command.stdin is None or args.offset is None:
        raise AetherError("conflict", f"command {command.id} has no open standard input")
    async with contextlib.aclosing(generator_of(stream.incoming())) as incoming:
        async for data in incoming:
            skip -= len(data)
            if skip < 0:
                raise AetherError("conflict", f"command {command.id} has no open standard input")
    return {"written": 0}


async def _feed_all(command: Command, data: bytes) -> None:
    try:
        await command.feed(data)
    except AetherError:
        return  # it has closed its standard input: its business
    command.end_input()


async def _inward(stream: Stream, near: MemoryStream) -> None:
    try:
        async for data in stream.incoming():
            await near.send(data)
    except anyio.BrokenResourceError:
        return
    await near.send_eof()


async def _outward(stream: Stream, near: MemoryStream) -> None:
    async for data in near:
        await stream.data(data)
    await stream.end()


def as_map(command: Command) -> dict[str, object]:
    """A command view."""
    built: dict[str, object] = msgspec.to_builtins(command.view())
    return built


async def _result(stream: Stream, command: Command) -> dict[str, object]:
    """A command view with what was captured; too much for one frame goes ahead as data."""
    out, err = command.stdout, command.stderr
    if out.held + err.held <= INLINE_BYTES:
        captured = {"stdout": out.captured(), "stderr": err.captured()}
        return {**as_map(command), **captured}
    lengths = {"stdout": out.lengths(), "stderr": err.lengths()}
    kept = (out.kept(), Channel.STDOUT), (err.kept(), Channel.STDERR)
    for data, channel in kept:
        await stream.data(data, channel)
    return {**as_map(command), **lengths}
