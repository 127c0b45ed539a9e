"""One simulated sandbox: its files, processes and commands, and the methods that reach them."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.abc
import msgspec

from dsec.base.clock import Clock
from dsec.edge.sim import archives, watching
from dsec.edge.sim.command_methods import Arguments, CommandMethods, decode, in_parts
from dsec.edge.sim.commands import Commands, Rules
from dsec.edge.sim.file_methods import (
    Files,
    ListArgs,
    MkdirArgs,
    MoveArgs,
    PathArgs,
    ReadArgs,
    RemoveArgs,
    StatArgs,
    WriteArgs,
)
from dsec.edge.sim.filesystem import FileSystem
from dsec.edge.sim.pipes import MemoryStream, memory_pair
from dsec.edge.sim.processes import INIT, ProcessTable
from dsec.edge.sim.sessions import Sessions
from dsec.edge.sim.skeleton import furnish
from dsec.edge.sim.vocabulary import PROGRAMS
from dsec.edge.sim.wire import Connection, Handler, Stream
from dsec.wire.sandbox import Limits, Process, Usage

VERSION = "simulated"
PROTOCOL = 1
CHANNEL_BYTES = 1 << 20
P = TypeVar("P", bound=PathArgs)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a sandbox is told of itself."""

    id: str
    hostname: str
    limits: Limits
    rules: Rules


class SimAether:
    """A sandbox in memory that speaks spec/frames.md to whoever connects."""

    def __init__(self, identity: Identity, group: anyio.abc.TaskGroup, clock: Clock) -> None:
        self.id = identity.id
        self.fs = FileSystem(clock.now)
        furnish(self.fs, PROGRAMS, identity.hostname)
        self.table = ProcessTable(
            group,
            self.fs,
            pids=identity.limits.pids,
            memory_bytes=identity.limits.memory_mb << 20,
        )
        self.commands = Commands(group, self.table, PROGRAMS, identity.rules)
        self.sessions = Sessions(group, self.table, PROGRAMS, self.commands)
        self.files = Files(self.fs, identity.rules.user)
        self.dead = False
        self.frozen = False
        self._thawed = anyio.Event()
        self._group = group
        self._clock = clock
        self._connection: Connection | None = None
        self._calls = CommandMethods(self.commands, self.sessions, self.table)
        self._methods = self._table_of_methods()

    def connect(self) -> MemoryStream:
        """A fresh connection; an older one is dropped."""
        self.drop_connection()
        near, far = memory_pair(CHANNEL_BYTES)
        connection = Connection(far, self._methods, self._stand_still)
        self._connection = connection
        self._group.start_soon(connection.serve)
        return near

    def drop_connection(self) -> None:
        """End the connection; commands go on."""
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    def freeze(self) -> None:
        """Neither hear nor say anything."""
        if not self.frozen:
            self.frozen, self._thawed = True, anyio.Event()

    def thaw(self) -> None:
        """Go on."""
        self.frozen = False
        self._thawed.set()

    def resize(self, limits: Limits) -> None:
        """Have other limits. Raises Conflict: it uses more memory than that."""
        self.table.bound(limits.pids, limits.memory_mb << 20)

    async def _stand_still(self) -> None:
        if self.frozen:
            await self._thawed.wait()

    def die(self) -> None:
        """End at once, and everything in it."""
        self.dead = True
        self.table.kill_all()
        self.drop_connection()

    def usage(self) -> Usage:
        """As seen from outside."""
        return Usage(
            at=self._clock.now(),
            memory_bytes=self.table.memory_bytes(),
            memory_peak_bytes=max(self.table.memory_peak_bytes, self.table.memory_bytes()),
            memory_limit_bytes=self.table.memory_limit_bytes,
            pids=len(self.table.living) + 1,
            oom_kills=self.table.oom_kills,
            disk_bytes=self.fs.size_bytes(),
        )

    def _table_of_methods(self) -> Mapping[str, Handler]:
        calls, files = self._calls, self.files
        method = functools.partial(_with, os.fsencode(self.commands.rules.workdir or "/"))
        return {
            "hello": self._hello,
            "start": calls.start,
            "run": calls.run,
            "wait": calls.wait,
            "attach": calls.attach,
            "stdin": calls.stdin,
            "resize": calls.resize,
            "signal": calls.signal,
            "kill": calls.kill,
            "list": calls.list,
            "view": calls.view,
            "session_open": calls.session_open,
            "session_close": calls.session_close,
            "session_list": calls.session_list,
            "connect": calls.connect,
            "read": method(ReadArgs, files.read),
            "write": method(WriteArgs, files.write),
            "stat": method(StatArgs, files.stat),
            "listdir": method(ListArgs, files.listdir),
            "mkdir": method(MkdirArgs, files.mkdir),
            "move": method(MoveArgs, files.move),
            "remove": method(RemoveArgs, files.remove),
            "watch": method(watching.WatchArgs, lambda s, a: watching.watch(files, s, a)),
            "tar_out": method(PathArgs, lambda s, a: archives.tar_out(files, s, a)),
            "tar_in": method(PathArgs, lambda s, a: archives.tar_in(files, s, a)),
            "processes": self._processes,
            "usage": self._usage,
            "tamper": self._tamper,
            "hold": self._nothing,
            "release": self._nothing,
            "shutdown": self._shutdown,
        }

    async def _hello(self, _stream: Stream, _arguments: Arguments) -> object:
        return {
            "protocol": PROTOCOL,
            "version": VERSION,
            "id": self.id,
            "generation": 0,
            "pid": INIT,
        }

    async def _processes(self, stream: Stream, _arguments: Arguments) -> object:
        first = Process(pid=INIT, state="S", argv=["aether (simulated)"])
        others = [
            Process(
                pid=p.pid,
                ppid=p.ppid,
                uid=p.around.who.uid,
                state="S",
                rss_bytes=p.memory_bytes,
                argv=p.argv,
            )
            for p in self.table.living.values()
        ]
        return await in_parts(stream, msgspec.to_builtins([first, *others]))

    async def _nothing(self, _stream: Stream, _arguments: Arguments) -> None:
        """Its commands go on in a pause, and so does their time."""

    async def _usage(self, _stream: Stream, _arguments: Arguments) -> object:
        return msgspec.to_builtins(self.usage())

    async def _tamper(self, _stream: Stream, _arguments: Arguments) -> object:
        return {"simulated": True}

    async def _shutdown(self, stream: Stream, arguments: Arguments) -> None:
        self.table.kill_all(signal.SIGTERM)
        with anyio.move_on_after(float(arguments.get("grace_s") or 0)):
            while self.table.living:
                await next(iter(self.table.living.values())).ended.wait()
        self.dead = True
        self.table.kill_all()
        self._group.start_soon(self._leave, stream)

    async def _leave(self, stream: Stream) -> None:
        await stream.over.wait()
        if self._connection is not None:
            await self._connection.flush()
        self.die()


def _with(
    workdir: bytes, shape: type[P], method: Callable[[Stream, P], Awaitable[object]]
) -> Handler:
    async def handle(stream: Stream, arguments: Mapping[str, Any]) -> object:
        args = decode(arguments, shape)
        args.path = _below(workdir, args.path)
        if isinstance(args, MoveArgs):
            args.to = _below(workdir, args.to)
        return await method(stream, args)

    return handle


def _below(workdir: bytes, path: bytes) -> bytes:
    return path if not path or path.startswith(b"/") else workdir.rstrip(b"/") + b"/" + path
