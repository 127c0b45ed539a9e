"""The edge's side of the warden: starts it, tells it who may reach what, starts it again.

What every sandbox may reach is kept here, so that a new warden knows it before anything else. While
there is none, what goes directly goes on; names and inspected connections wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.abc
import msgspec
from anyio.abc import ByteStream, SocketStream

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, RequestError, Unavailable
from dsec.edge.network.warden.connection import Connection, OnDenied
from dsec.edge.network.warden.messages import (
    Assign,
    Configure,
    Done,
    Forget,
    HeldName,
    Refill,
)
from dsec.edge.network.warden.settings import Settings
from dsec.kit.blocking import in_thread
from dsec.linux.spawn import Child, spawn

logger = logging.getLogger("dsec.edge.warden")

WARDEN = (sys.executable, "-m", "dsec.edge.network.warden")
ANSWER_S = 10.0
"""A warden that takes longer is broken, and is ended."""
_START_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_HEALTHY_S = 30.0
"""One that lived this long did not die of its start."""
_CONTROL_IN_CHILD = 3
_PATIENCE_S = 3.0
"""How long a warden may take to end in order."""

Start = Callable[[], AbstractAsyncContextManager[ByteStream]]


class WardenClient:
    """Keeps one warden running. `run` in the edge's task group; the rest from anywhere in its loop."""

    def __init__(
        self, settings: Settings, on_denied: OnDenied, clock: Clock, start: Start | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            settings: what it is told first.
            on_denied: called with what sandboxes were denied; it must not fail.
            clock: to tell a warden that lived from one that died of its start.
            start: makes one, and ends it; a process of its own if not given.
        """
        self._settings = settings
        self._on_denied = on_denied
        self._clock = clock
        self._start = start or process
        self._assigned: dict[str, Assign] = {}
        self._connection: Connection | None = None
        self._changed = anyio.Event()
        self._failure: DsecError | None = None
        self.ports: dict[str, int] = {}
        """Which it listens on, by kind; none: it never did."""

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep it running until cancelled; started when it first listens.

        Raises:
            Unavailable: the first one cannot begin. Later ones are tried again for ever.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            since = self._clock.monotonic()
            await self._live_once(task_status)
            if not self.ports:
                raise self._failure or Unavailable("the warden ended before it listened")
            if self._clock.monotonic() - since > _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            logger.warning("the warden is gone", extra={"next_in_s": pause_s})
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def assign(self, assign: Assign) -> tuple[HeldName, ...]:
        """Say what the sandbox at some addresses may reach, in place of all said before.

        It is kept for later wardens whatever this one answers, unless it is wrong in itself.

        Returns:
            What it was given for names and may still reach: belongs into a map that replaces its
            filter's, and `refill` after that, for what was given meanwhile.

        Raises:
            InvalidRequest: an address or network is none.
            Unavailable: no warden in time; the next one is told.
        """
        before = self._assigned.get(assign.address4)
        self._assigned[assign.address4] = assign
        try:
            return (await self._ask(_copy(assign))).held
        except RequestError:
            if before is not None:
                self._assigned[assign.address4] = before
            else:
                self._assigned.pop(assign.address4, None)
            raise

    async def refill(self, address4: str) -> None:
        """Put what a sandbox holds into its filter's map again.

        Raises:
            Unavailable: no warden in time; the next one knows of nothing that was given.
        """
        await self._ask(Refill(address4=address4))

    async def forget(self, address4: str) -> None:
        """A sandbox is over: its connections end, its address may be another's.

        Raises:
            Unavailable: the warden is gone; the next one is not told of it.
        """
        known = self._assigned.pop(address4, None) is not None
        if known and self._connection is not None:
            await self._connection.ask(Forget(address4=address4), ANSWER_S)

    async def _ask(self, request: Assign | Refill | Forget) -> Done:
        try:
            with anyio.fail_after(ANSWER_S):
                while (connection := self._connection) is None:
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable("there is no warden") from self._failure
        return await connection.ask(request, ANSWER_S)

    async def _live_once(self, task_status: anyio.abc.TaskStatus[None]) -> None:
        """One warden's life."""
        try:
            async with self._start() as stream:
                await self._live(Connection(stream, self._on_denied), task_status)
        except OSError as exc:
            self._failure = Unavailable(f"the warden cannot be started: {exc}")
        if self._failure is not None:
            logger.warning("the warden failed", extra={"why": self._failure.message})

    async def _live(self, connection: Connection, task_status: anyio.abc.TaskStatus[None]) -> None:
        self._failure = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._bring_up, connection, task_status)
                await connection.receive()
                tasks.cancel_scope.cancel()
        finally:
            self._connection = None

    async def _bring_up(
        self, connection: Connection, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        """Tell a new warden all there is; then it may be asked by others."""
        first = not self.ports
        try:
            done = await connection.ask(Configure(settings=self._settings), _START_S)
            await self._tell_all(connection)
        except DsecError as exc:
            self._failure = exc
            await connection.end()
            return
        self.ports = done.ports
        self._connection = connection
        self._changed.set()
        self._changed = anyio.Event()
        if first:
            task_status.started()

    async def _tell_all(self, connection: Connection) -> None:
        """Until nothing is left that was said meanwhile. Raises Unavailable: it is gone."""
        told: dict[str, Assign] = {}
        while told != self._assigned:
            for address4 in told.keys() - self._assigned.keys():
                del told[address4]
                await connection.ask(Forget(address4=address4), ANSWER_S)
            for address4, assign in list(self._assigned.items()):
                if told.get(address4) is not assign:
                    told[address4] = assign
                    await _tell(connection, assign)


async def _tell(connection: Connection, assign: Assign) -> None:
    """One sandbox's trouble is not the others'. Raises Unavailable: the warden is gone."""
    try:
        await connection.ask(_copy(assign), ANSWER_S)
    except DsecError as exc:
        if connection.over:
            raise
        extra = {"sandbox_id": assign.sandbox, "why": exc.message}
        logger.warning("a sandbox's rules are not in force", extra=extra)


def _copy(assign: Assign) -> Assign:
    """Requests are numbered in place."""
    return msgspec.structs.replace(assign)


@asynccontextmanager
async def process() -> AsyncIterator[ByteStream]:
    """A warden's process and its control connection. Raises OSError: it cannot be started."""
    here, there = socket.socketpair()
    with there, contextlib.ExitStack() as undo:
        undo.enter_context(here)
        here.setblocking(False)
        child = await in_thread("names", _spawned, there)
        undo.pop_all()
    try:
        async with await SocketStream.from_socket(here) as stream:
            yield stream
    finally:
        with anyio.CancelScope(shield=True):
            await in_thread("names", child.reap, _PATIENCE_S)


def _spawned(there: socket.socket) -> Child:
    argv = [*WARDEN, "--control", str(_CONTROL_IN_CHILD)]
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return spawn(argv, {_CONTROL_IN_CHILD: there.fileno()}, env)
