"""A running command: its events, its input, its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from typing_extensions import override

from dsec.sdk import _aio
from dsec.sdk._async.call import UPLOAD_S, Body, Caller
from dsec.sdk._async.lines import ResumedLines, decoded
from dsec.sdk._http import QueryValue, Request
from dsec.sdk.models import ExecResult, exec_result
from dsec.wire.sandbox import (
    CommandEvent,
    CommandResult,
    CommandView,
    Exited,
    Gap,
    Heartbeat,
    Output,
    Started,
    StreamError,
)

T = TypeVar("T")
GRACE_S = 60.0
"""Beyond a command's own limit: for the server to kill it and to answer."""
SERVER_DEFAULT_TIMEOUT_S = 3600.0
Event = Started | Output | Gap | Exited
_EVENT: msgspec.json.Decoder[CommandEvent] = msgspec.json.Decoder(CommandEvent)


class CommandEvents(ResumedLines[Event]):
    """Started, then Output and Gap as they come, then Exited.

    A connection that breaks is made again and goes on where the last one ended.
    """

    def __init__(self, caller: Caller, path: str, start: tuple[int, int] = (0, 0)) -> None:
        super().__init__(caller)
        self._path = path
        self._next = {"stdout": start[0], "stderr": start[1]}
        self._started = False

    @override
    async def _ask(self) -> Request:
        offsets = {"stdout_from": self._next["stdout"], "stderr_from": self._next["stderr"]}
        return self._caller.request("GET", f"{self._path}/events", offsets)

    @override
    def _unfinished(self) -> str:
        return "the stream ended before the command did"

    @override
    async def _take(self, line: bytes) -> Event | None:
        match decoded(_EVENT, line):
            case Output() as event:
                return self._output(event)
            case Gap() as event:
                self._next[event.stream] = event.offset
                return event
            case Started() as event:
                first, self._started = not self._started, True
                return event if first else None
            case Exited() as event:
                await self._finish()
                return event
            case StreamError() as event:
                await self._failed(event)
            case Heartbeat() | None:
                pass
        return None

    def _output(self, event: Output) -> Output | None:
        seen = self._next[event.stream] - event.offset
        self._next[event.stream] = max(self._next[event.stream], event.offset + len(event.data))
        if seen <= 0:
            return event
        if seen >= len(event.data):
            return None
        return Output(stream=event.stream, offset=event.offset + seen, data=event.data[seen:])


class Command:
    """A command in a sandbox; it goes on whether or not anybody listens."""

    def __init__(
        self, caller: Caller, sandbox_path: str, view: CommandView, fed_bytes: int | None = None
    ) -> None:
        """A handle; `fed_bytes` of input were written by this one, None: others may have too."""
        self._caller = caller
        self._path = f"{sandbox_path}/commands/{view.command_id}"
        self._fed_bytes = fed_bytes
        self._feeding = _aio.Lock()
        self.view = view
        """As it was last heard of."""

    @property
    def id(self) -> str:
        """Its id, good for `sandbox.command(id)`."""
        return self.view.command_id

    @override
    def __repr__(self) -> str:
        return f"<Command {self.id}>"

    def events(self, stdout_from: int = 0, stderr_from: int = 0) -> CommandEvents:
        """What happens, from these offsets on; survives reconnects. Nothing is sent until used."""
        return CommandEvents(self._caller, self._path, (stdout_from, stderr_from))

    async def write(self, data: bytes | str) -> None:
        """Write to its standard input; returns when the command's pipe has taken it.

        Each byte says where in the input it belongs, so that what is sent again is taken once. A
        handle from `sandbox.command` does not know where its bytes belong: they are sent once.

        Raises:
            Conflict: it was not started with stdin="pipe", its input is closed, or somebody else
                wrote to it.
            Unavailable: the connection stayed lost; part of `data` may have arrived. With a handle
                from `start`, write the same again.
        """
        raw = data.encode() if isinstance(data, str) else data
        if raw:
            async with self._feeding:
                await self._caller.do(self._stdin(raw, eof=False))
                self._took(len(raw))

    async def write_from(
        self,
        source: Body,
        *,
        eof: bool = True,
        timeout: float | None = None,
        again: bool = False,
    ) -> None:
        """Stream to its standard input.

        Args:
            source: makes the iterator of chunks.
            eof: end its input after them.
            timeout: seconds for all of it; None: as long as it takes.
            again: `source` gives the same bytes each time it is called, so that they can be sent
                again after a lost connection.

        Raises:
            Conflict, Unavailable: as for `write`.
        """
        async with self._feeding:
            request = self._caller.upload(
                "POST",
                f"{self._path}/stdin",
                self._place(eof=eof),
                repeatable=again and self._fed_bytes is not None,
                kind="application/octet-stream",
            )
            counted = _Counted(source)
            patience = self._caller.patience(timeout)
            response = await self._caller.open(request, patience, counted.chunks)
            await response.aclose()
            self._took(counted.size_bytes)

    async def close_stdin(self) -> None:
        """End its standard input."""
        async with self._feeding:
            await self._caller.do(self._stdin(b"", eof=True))

    def _stdin(self, data: bytes, *, eof: bool) -> Request:
        # Without a place, what is sent twice would be read twice; the end alone may be said twice.
        return self._caller.request(
            "POST",
            f"{self._path}/stdin",
            self._place(eof=eof),
            data,
            repeatable=not data or self._fed_bytes is not None,
            patience_s=UPLOAD_S,
        )

    def _place(self, *, eof: bool) -> dict[str, QueryValue]:
        return {"eof": 1 if eof else None, "offset": self._fed_bytes}

    def _took(self, size_bytes: int) -> None:
        if self._fed_bytes is not None:
            self._fed_bytes += size_bytes

    async def signal(self, name: str) -> None:
        """Send a signal by name, e.g. "INT", to its foreground process group."""
        query = {"signal": name.removeprefix("SIG")}
        key = self._caller.new_key()
        await self._caller.do(self._caller.request("POST", f"{self._path}/signal", query, key=key))

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of its terminal."""
        query = {"rows": rows, "cols": cols}
        await self._caller.do(self._caller.request("POST", f"{self._path}/resize", query))

    async def refresh(self) -> CommandView:
        """Ask how it stands."""
        self.view = await self._caller.call(self._caller.request("GET", self._path), CommandView)
        return self.view

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait for its end.

        Args:
            timeout: how long to wait, in seconds; None: as long as the command itself may run.

        Raises:
            DeadlineExceeded: it still runs.
            SandboxGone: its sandbox is over.
        """
        limit = timeout if timeout is not None else deadline_s(self.view.timeout_s)
        patience = self._caller.patience(limit)
        request = self._caller.request("GET", f"{self._path}/result")
        return exec_result(await self._caller.call(request, CommandResult, patience))

    async def kill(self) -> CommandView:
        """End it and everything it started."""
        self.view = await self._caller.call(self._caller.request("DELETE", self._path), CommandView)
        return self.view


class _Counted:
    """Chunks, and how many bytes they were when last sent."""

    def __init__(self, source: Body) -> None:
        self._source = source
        self.size_bytes = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        """From the start."""
        self.size_bytes = 0
        async for data in self._source():
            self.size_bytes += len(data)
            yield data


def deadline_s(timeout: float | None) -> float:
    """How long a client waits for a command with this limit."""
    return (SERVER_DEFAULT_TIMEOUT_S if timeout is None else timeout) + GRACE_S
