"""The processes that start sandboxes (`aether launch`), and what is said to them.

Each works on one sandbox at a time, so there are a few; sandboxes go on when one ends. Words:
spec/launch.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec

from dsec.base.errors import DsecError, StartFailed, Unavailable
from dsec.edge.connection import UnixConnection
from dsec.images import disk
from dsec.kit.blocking import in_thread
from dsec.linux import hostinfo
from dsec.linux.spawn import Child, spawn
from dsec.wire.launch import ExitNotice, LaunchReply, LaunchRequest, LaunchSpec

logger = logging.getLogger("dsec.edge.launcher")

MAX_LAUNCHERS = 4
MAX_EPITAPHS = 1024
MAX_MESSAGE_BYTES = 1 << 20
RESTART_PAUSE_S = 0.1
RESTART_PAUSE_MAX_S = 5.0
REAP_PATIENCE_S = 5.0
"""For what it is still making, when it is told to end."""
END_PATIENCE_S = 10.0
ON_DISK = ("make directory", "listen", "mount overlay")
"""Steps that write to the disk. At others the same error number means a limit of the kernel."""
SETTLED_S = 10.0
"""One that lives this long is not of a row that ends at once."""

_encode = msgspec.msgpack.Encoder().encode
_reply = msgspec.msgpack.Decoder(LaunchReply)
_notice = msgspec.msgpack.Decoder(ExitNotice)
_is_notice = msgspec.msgpack.Decoder(dict[str, object])


class _Wait:
    """Somebody waiting for a reply."""

    __slots__ = ("done", "error", "reply")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.reply: LaunchReply | None = None
        self.error: DsecError | None = None


class Launcher:
    """One `aether launch` process, started again when it ends."""

    def __init__(self, binary: Path, epitaphs: OrderedDict[str, str]) -> None:
        self._binary = binary
        self._epitaphs = epitaphs
        self._connection: UnixConnection | None = None
        self._buffer = bytearray()
        self._waiting: dict[int, _Wait] = {}
        self._next = 0
        self._lost = anyio.Event()
        self._reaped = anyio.Event()
        self._patience_s = REAP_PATIENCE_S

    @property
    def load(self) -> int:
        """How many launches it has to do; a launcher that is down takes none."""
        return len(self._waiting) if self._connection else 1 << 30

    async def launch(self, spec: LaunchSpec) -> LaunchReply:
        """Have it start a sandbox.

        Cancelled, it ends the launcher, which starts again: what is still being made must not appear
        after the caller has taken it back.

        Raises:
            StartFailed: it could not; the details say where. StorageFull: no room for it.
            Unavailable: the launcher itself is down; what it had made may be left.
        """
        if self._connection is None:
            raise Unavailable("no process that starts sandboxes is running; see the edge's log")
        self._next += 1
        wait = self._waiting[self._next] = _Wait()
        message = _encode(LaunchRequest(id=self._next, spec=spec))
        self._connection.write(len(message).to_bytes(4, "big") + message)
        try:
            await wait.done.wait()
        except BaseException:
            if not wait.done.is_set():
                await self._end()
            raise
        if wait.error is not None:
            raise wait.error
        assert wait.reply is not None  # noqa: S101 - set with done
        return _checked(wait.reply)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Keep it running. Started when the first one is; that one must come up.

        Raises:
            OSError: the binary cannot be started at all.
        """
        pause = RESTART_PAUSE_S
        first = True
        while True:
            try:
                child = await self._start()
            except OSError:
                if first:
                    raise
                logger.exception("a launcher could not be started again")
            else:
                if first:
                    task_status.started()
                    first = False
                if await self._lived(child):
                    pause = RESTART_PAUSE_S
            await anyio.sleep(pause)
            pause = min(RESTART_PAUSE_MAX_S, pause * 2)

    async def _lived(self, child: Child) -> bool:
        """Wait for its end; whether it lasted a while."""
        try:
            with anyio.move_on_after(SETTLED_S) as early:
                await self._lost.wait()
            await self._lost.wait()
        finally:
            self._stop()
            with anyio.CancelScope(shield=True):
                status = await in_thread("scan", child.reap, self._patience_s)
                self._reaped.set()
        logger.error("a launcher ended", extra={"pid": child.pid, "status": status})
        return early.cancelled_caught

    async def _start(self) -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                argv = [str(self._binary), "launch"]
                child = await in_thread("scan", spawn, argv, {3: theirs.fileno()})
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._lost = anyio.Event()
        self._reaped = anyio.Event()
        self._patience_s = REAP_PATIENCE_S
        self._buffer.clear()
        self._connection = await UnixConnection.open(ours)
        self._connection.attach(self._feed, self._ended)
        return child

    async def _end(self) -> None:
        """End it, and wait until its process is gone, though not for ever: it may hang in the kernel."""
        reaped = self._reaped
        self._patience_s = 0.0
        self._stop()
        with anyio.move_on_after(END_PATIENCE_S, shield=True):
            await reaped.wait()

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._ended()

    def _ended(self) -> None:
        self._connection = None
        waiting, self._waiting = self._waiting, {}
        for wait in waiting.values():
            wait.error = Unavailable("the process that was starting the sandbox ended")
            wait.done.set()
        self._lost.set()

    def _feed(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4:
            size = int.from_bytes(buffer[:4], "big")
            if size > MAX_MESSAGE_BYTES:
                logger.error("a launcher broke the protocol", extra={"size": size})
                self._stop()
                return
            if len(buffer) < 4 + size:
                return
            self._take(bytes(buffer[4 : 4 + size]))
            del buffer[: 4 + size]

    def _take(self, message: bytes) -> None:
        if "exited" in _is_notice.decode(message):
            notice = _notice.decode(message)
            self._epitaphs[notice.exited] = _words(notice.status)
            while len(self._epitaphs) > MAX_EPITAPHS:
                self._epitaphs.popitem(last=False)
            return
        reply = _reply.decode(message)
        if wait := self._waiting.pop(reply.id, None):
            wait.reply = reply
            wait.done.set()


class Launchers:
    """All of a node's launchers."""

    def __init__(self, binary: Path, count: int = 0) -> None:
        self._epitaphs: OrderedDict[str, str] = OrderedDict()
        number = count or min(MAX_LAUNCHERS, hostinfo.cpus())
        self._launchers = [Launcher(binary, self._epitaphs) for _ in range(number)]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start them, and keep them.

        Raises:
            OSError: the binary cannot be started.
        """
        async with anyio.create_task_group() as group:
            for launcher in self._launchers:
                await group.start(launcher.run)
            yield
            group.cancel_scope.cancel()

    async def launch(self, spec: LaunchSpec) -> LaunchReply:
        """Have the least busy one start a sandbox; see `Launcher.launch`."""
        return await min(self._launchers, key=lambda launcher: launcher.load).launch(spec)

    def epitaph(self, sandbox: str) -> str:
        """How a sandbox's first process ended, "" if nobody said."""
        return self._epitaphs.get(sandbox, "")


def _checked(reply: LaunchReply) -> LaunchReply:
    if reply.pid:
        return reply
    why = os.strerror(reply.errno) if reply.errno else "no error number"
    where = f" ({reply.path})" if reply.path else ""
    if reply.errno in disk.FULL and reply.step in ON_DISK:
        raise disk.storage_full(Path(reply.path or "/"))
    said = reply.message or why
    if not said.startswith(reply.step):
        said = f"{reply.step}{where}: {said}"
    raise StartFailed(
        f"the sandbox could not be started: {said}",
        step=reply.step,
        path=reply.path or None,
        errno=reply.errno or None,
    )


def _words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return (
        f"its first process was ended by signal {-code}"
        if code < 0
        else (f"its first process exited with {code}")
    )
