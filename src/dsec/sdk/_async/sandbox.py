"""A sandbox, as its user holds it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Literal, Self

import msgspec
from typing_extensions import override

from dsec.base.errors import (
    Conflict,
    DsecError,
    InternalError,
    InvalidRequest,
    NotFound,
    SandboxGone,
)
from dsec.base.ids import SandboxId, child_id
from dsec.sdk import _aio
from dsec.sdk._answers import error_of
from dsec.sdk._async.branch import START_S, Branch, branch
from dsec.sdk._async.call import Caller, EventStream
from dsec.sdk._async.command import Command, deadline_s
from dsec.sdk._async.files import Files
from dsec.sdk._async.lines import LineStream
from dsec.sdk._async.session import Session
from dsec.sdk._async.state import LONG_S, StateCalls
from dsec.sdk._async.transport import PortStream
from dsec.sdk._http import Request, segment
from dsec.sdk._ids import Ids, Numbered
from dsec.sdk._patience import Patience
from dsec.sdk.models import ExecResult, exec_result, seconds
from dsec.wire.public_v1 import BatchItem
from dsec.wire.sandbox import (
    CommandResult,
    CommandSpec,
    CommandView,
    Fork,
    Process,
    PtySize,
    SandboxView,
    SessionSpec,
    SessionView,
    Usage,
)

STOP_TIMEOUT_S = 120.0
KILL_TIMEOUT_S = 5.0
_BATCH_LINE: msgspec.json.Decoder[BatchItem] = msgspec.json.Decoder(BatchItem)


class Sandbox(StateCalls):
    """One sandbox. Used with `async with` it is stopped at the end."""

    def __init__(self, caller: Caller, view: SandboxView) -> None:
        super().__init__(caller, view)
        self.files = Files(caller, self._path)

    @property
    def id(self) -> str:
        """Its id, good for `client.get(id)`."""
        return self.view.id

    @property
    def warnings(self) -> list[str]:
        """What was asked for and is not to be had on its host."""
        return self.view.warnings

    @override
    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.view.state.value}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _aio.finishing(STOP_TIMEOUT_S):
            await self.stop()

    async def exec(  # noqa: PLR0913 - keywords
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        input: bytes | str | None = None,  # noqa: A002 - subprocess.run's name for it
        timeout: float | None = None,
        session: str | None = None,
        entrypoint: bool = False,
        command_id: str | None = None,
        output_limit_bytes: int | None = None,
    ) -> ExecResult:
        """Run a command and wait for its end. Its exit status is a value, not an error.

        Args:
            argv: program and arguments; no shell reads them.
            cwd: directory; None: the sandbox's.
            env: added to the sandbox's environment.
            user: who runs it; None: the sandbox's `init_user`.
            input: its standard input; None: empty.
            timeout: seconds after which it is killed, with all it started; None: the server's
                default (an hour). The output up to then is in the result.
            session: a persistent session to run it in.
            entrypoint: put the image's Entrypoint before `argv`; with an empty `argv`, run its
                Entrypoint and Cmd.
            command_id: its id, if you want to choose it: a repeated call with the same id gets the
                same run, and cancelling the call lets it go on. Without, cancelling kills it.
            output_limit_bytes: kept of each stream, half from its head and half from its tail;
                None: 1 MiB.

        Raises:
            SandboxGone: the sandbox is over.
            NotFound: the user, directory or session does not exist.
            Unavailable: the platform stayed unreachable; the command may be running. Call again
                with its `command_id` (in `details`) to get its result.
        """
        spec = CommandSpec(
            command_id=self._new_command() if command_id is None else command_id,
            argv=_argv(argv) or None if entrypoint else _argv(argv),
            entrypoint=entrypoint,
            session=session,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            timeout_s=seconds(timeout, "timeout"),
            output_limit_bytes=output_limit_bytes,
        )
        return await self._run(spec, input, ours=self._ours(command_id))

    async def run_shell(  # noqa: PLR0913 - keywords
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        input: bytes | str | None = None,  # noqa: A002 - subprocess.run's name for it
        timeout: float | None = None,
        session: str | None = None,
        command_id: str | None = None,
        output_limit_bytes: int | None = None,
    ) -> ExecResult:
        """Run a line of shell, by the image's bash or sh, and wait for its end; see `exec`."""
        spec = CommandSpec(
            command_id=self._new_command() if command_id is None else command_id,
            shell=command,
            session=session,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            timeout_s=seconds(timeout, "timeout"),
            output_limit_bytes=output_limit_bytes,
        )
        return await self._run(spec, input, ours=self._ours(command_id))

    def _new_command(self) -> str:
        self._caller.recorded = None
        return self._caller.ids.command()

    def _ours(self, command_id: str | None) -> bool:
        return command_id is None and not self._caller.ids.chosen

    async def _run(self, spec: CommandSpec, given: bytes | str | None, *, ours: bool) -> ExecResult:
        try:
            if given is not None:
                return await self._run_with_input(spec, given)
            return await self._run_without(spec)
        except BaseException as exc:
            if ours and _aio.given_up(exc):
                # Nobody else knows its id: it would run on for nobody.
                with _aio.finishing(KILL_TIMEOUT_S), suppress(DsecError):
                    await self._kill(str(spec.command_id))
            raise

    async def _kill(self, command_id: str) -> None:
        request = self._caller.request("DELETE", f"{self._path}/commands/{command_id}")
        await self._caller.do(request, self._caller.patience(KILL_TIMEOUT_S))

    async def _run_without(self, spec: CommandSpec) -> ExecResult:
        patience = self._caller.patience(deadline_s(spec.timeout_s))
        request = self._caller.request("POST", f"{self._path}/commands/run", body=spec)
        return exec_result(await self._caller.call(request, CommandResult, patience))

    async def _run_with_input(self, spec: CommandSpec, given: bytes | str) -> ExecResult:
        spec.stdin = "pipe"
        command = await self._start(spec)
        raw = given.encode() if isinstance(given, str) else given
        # It may end, or close its input, without reading all: its result says how.
        with suppress(Conflict, NotFound):
            await command.write_from(
                lambda: _chunks(raw), timeout=deadline_s(spec.timeout_s), again=True
            )
        return await command.wait(deadline_s(spec.timeout_s))

    async def start(  # noqa: PLR0913 - keywords
        self,
        argv: Sequence[str] | None = None,
        *,
        shell: str | None = None,
        stdin: Literal["null", "pipe"] = "null",
        pty: PtySize | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        session: str | None = None,
        entrypoint: bool = False,
        command_id: str | None = None,
        output_limit_bytes: int | None = None,
    ) -> Command:
        """Start a command and let it go on by itself; keywords as in `exec`.

        Args:
            argv: program and arguments; this or `shell`.
            shell: a line for the image's shell; this or `argv`.
            stdin: "pipe" to write to it.
            pty: give it a terminal of this size; its input is then a pipe whatever `stdin` says.
            cwd: see `exec`.
            env: see `exec`.
            user: see `exec`.
            timeout: see `exec`.
            session: see `exec`.
            entrypoint: see `exec`.
            command_id: see `exec`.
            output_limit_bytes: see `exec`.
        """
        spec = CommandSpec(
            command_id=self._new_command() if command_id is None else command_id,
            argv=None if argv is None else _argv(argv),
            shell=shell,
            entrypoint=entrypoint,
            session=session,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            stdin="pipe" if pty is not None else stdin,
            pty=pty,
            timeout_s=seconds(timeout, "timeout"),
            output_limit_bytes=output_limit_bytes,
        )
        return await self._start(spec)

    async def _start(self, spec: CommandSpec) -> Command:
        request = self._caller.request("POST", f"{self._path}/commands", body=spec)
        view = await self._caller.call(request, CommandView)
        return Command(self._caller, self._path, view, fed_bytes=0)

    async def command(self, command_id: str) -> Command:
        """A handle on a command started before, here or elsewhere.

        Raises:
            NotFound: there is none of that id.
        """
        request = self._caller.request("GET", f"{self._path}/commands/{segment(command_id)}")
        return Command(self._caller, self._path, await self._caller.call(request, CommandView))

    async def commands(self) -> list[CommandView]:
        """Commands running and ended, as far back as the sandbox remembers."""
        request = self._caller.request("GET", f"{self._path}/commands")
        return await self._caller.call(request, list[CommandView])

    async def open_session(
        self,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        shell: str | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Open a persistent shell: what `cd` and `export` do stays from one command to the next."""
        spec = SessionSpec(
            session_id=self._caller.ids.session() if session_id is None else session_id,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            shell=shell,
        )
        request = self._caller.request(
            "POST", f"{self._path}/sessions", body=spec, key=self._caller.new_key()
        )
        view = await self._caller.call(request, SessionView)
        return Session(self._caller, self._path, view, self.run_shell)

    async def sessions(self) -> list[SessionView]:
        """Sessions that are open."""
        request = self._caller.request("GET", f"{self._path}/sessions")
        return await self._caller.call(request, list[SessionView])

    async def processes(self) -> list[Process]:
        """The processes in it, by the ids it sees itself."""
        request = self._caller.request("GET", f"{self._path}/processes")
        return await self._caller.call(request, list[Process])

    async def usage(self) -> Usage:
        """What it uses now."""
        return await self._caller.call(self._caller.request("GET", f"{self._path}/usage"), Usage)

    async def connect_port(self, port: int) -> PortStream:
        """A connection to a TCP port in the sandbox; `.send .receive .send_eof .aclose`.

        Raises:
            NotFound: nothing listens there.
        """
        return await self._caller.websocket(
            self._caller.request("GET", f"{self._path}/ports/{int(port)}")
        )

    def forward(
        self, port: int, host: str = "127.0.0.1", local_port: int = 0
    ) -> AbstractAsyncContextManager[tuple[str, int]]:
        """Listen on this machine; every connection goes to a port in the sandbox.

        Args:
            port: in the sandbox.
            host: where to listen.
            local_port: 0: any that is free.
        """

        async def dial() -> PortStream:
            return await self.connect_port(port)

        return _aio.listen(dial, host, local_port)

    async def refresh(self) -> SandboxView:
        """Ask how it stands."""
        self.view = await self._caller.call(self._caller.request("GET", self._path), SandboxView)
        return self.view

    async def fork(
        self, count: int = 1, *, labels: Mapping[str, str] | None = None, key: str = ""
    ) -> list[Sandbox]:
        """Make sandboxes that begin where this one stands: files are shared, processes are not.

        Args:
            count: how many, up to 1,000.
            labels: instead of this one's.
            key: a repeated call with the same key gives the same sandboxes.

        Raises:
            DsecError: one could not be made. Without a `key` of yours the others are stopped, and
                so they are if you cancel this.
        """
        kept = bool(key) or self._caller.ids.chosen
        key = key or self._caller.new_key()
        try:
            return await self._forked(self.forks(count, labels=labels, key=key))
        except InvalidRequest:  # refused as a whole
            raise
        except BaseException:
            if not kept:
                await self._abandon(key, count)
            raise

    async def _forked(self, batch: Batch) -> list[Sandbox]:
        made: list[Sandbox] = []
        failed: list[DsecError] = []
        async with batch as forks:
            async for child in forks:
                if isinstance(child, Sandbox):
                    made.append(child)
                else:
                    failed.append(child)
        if failed:
            raise failed[0]
        return made

    async def _abandon(self, key: str, count: int) -> None:
        """Stop the children of a fork, those too that nobody was told of; all in one's time."""
        until = _aio.monotonic() + STOP_TIMEOUT_S

        async def stop(index: int) -> None:
            child = child_id(SandboxId(self.id), key, index)
            patience = self._caller.patience(until - _aio.monotonic())
            with suppress(DsecError):  # most likely it was never made
                request = self._caller.request("DELETE", f"/v1/sandboxes/{child}")
                await self._caller.do(request, patience)

        with _aio.finishing(STOP_TIMEOUT_S):
            await _aio.each(stop, range(count))

    def forks(
        self, count: int = 1, *, labels: Mapping[str, str] | None = None, key: str = ""
    ) -> Batch:
        """Like `fork`; iterate over the answer: each as it is ready, or why it is not."""
        key = key or self._caller.new_key()
        body = Fork(count=count, labels=None if labels is None else dict(labels), key=key)
        request = self._caller.request(
            "POST", f"{self._path}/fork", body=body, key=key, patience_s=LONG_S
        )
        return Batch(self._caller, request, count, self._caller.patience())

    async def branch(
        self,
        step: int,
        *,
        labels: Mapping[str, str] | None = None,
        strict: bool = True,
        timeout: float = START_S,
    ) -> Branch[Sandbox]:
        """A new sandbox as this one was after a step of its trajectory; see `DSecClient.branch`."""
        return await branch(
            Sandbox, self._caller, self.id, step, labels=labels, strict=strict, timeout=timeout
        )

    def steps(self, prefix: str = "step", *, first: int = 1, pack: bool = False) -> Steps:
        """This sandbox, with operations numbered `<prefix>-000001`, ...; see `Steps`.

        Args:
            prefix: of the numbers.
            first: number.
            pack: take a snapshot, `<sandbox>-<prefix>-<number>`, after each command that was waited
                for and each change of files: to `branch` there is then to restore it. They hold
                all that was written, residue too, so you alone can; they are yours to remove.

        Raises:
            InvalidRequest: `prefix` is not made of letters, digits and `_.:-`, or too long.
        """
        numbering = self._caller.numbering(Numbered(prefix, first))
        return Steps(numbering, self.view, self if pack else None)

    async def stop(self) -> SandboxView:
        """Stop it; returns when nothing of it is left. Harmless twice, and if it is over already.

        Raises:
            DeadlineExceeded: not within two minutes.
        """
        patience = self._caller.patience(STOP_TIMEOUT_S)
        request = self._caller.request("DELETE", self._path)
        try:
            self.view = await self._caller.call(request, SandboxView, patience)
        except SandboxGone:
            await self.refresh()
        return self.view


class Steps(Sandbox):
    """A sandbox whose commands and changes have ids that the same program gives them again.

    A program that lost its place starts over: what was done already is answered from the sandbox's
    record and not done again, until it comes to what is new. It must ask for the same operations in
    the same order, one at a time, and look at nothing else (clock, chance) to decide. Reads are done
    anew: they see what is there now. Another operation under a number that is taken is a `Conflict`.
    """

    def __init__(self, caller: Caller, view: SandboxView, packer: Sandbox | None = None) -> None:
        super().__init__(caller, view)
        self._packer = packer
        """Takes a snapshot after each; its own operations have no numbers."""
        if packer is not None:
            caller.over = self._changed

    async def _changed(self, request: Request) -> None:
        key = request.headers.get("Idempotency-Key")
        if key is not None and request.path.startswith(
            (f"{self._path}/files", f"{self._path}/tree")
        ):
            await self._pack_step(key)

    @override
    async def _run(self, spec: CommandSpec, given: bytes | str | None, *, ours: bool) -> ExecResult:
        result = await super()._run(spec, given, ours=ours)
        await self._pack_step(str(spec.command_id))
        return result

    async def _pack_step(self, ident: str) -> None:
        """Pack what an operation has left behind; answered from the record it was packed before."""
        if self._packer is None or self.recorded:
            return
        with suppress(Conflict):
            await self._packer.pack(f"{self.id}-{ident}".replace(":", "-"), clean=False)

    @property
    def recorded(self) -> bool | None:
        """Whether the last operation was answered from the record; None: the platform did not say."""
        return self._caller.recorded

    @property
    def next(self) -> int:
        """The number the next operation gets."""
        ids = self._caller.ids
        return ids.next if isinstance(ids, Numbered) else 0


class Batch(EventStream[Sandbox | DsecError]):
    """The sandboxes of a batch, in order of completion.

    A connection that breaks is made again: the same key gets the same sandboxes, and those given
    out already are left out.
    """

    def __init__(self, caller: Caller, request: Request, count: int, patience: Patience) -> None:
        # Children have ids of their own to give: those of a numbered parent are the parent's.
        self._caller = caller.numbering(Ids()) if caller.ids.chosen else caller
        self._items = LineStream(
            caller,
            lambda: request,
            _BATCH_LINE,
            lambda item: item.index,
            count=count,
            patience=patience,
        )

    @override
    async def __anext__(self) -> Sandbox | DsecError:
        """The next sandbox, or why one of them could not be started."""
        item = await self._items.__anext__()
        if item.sandbox is not None:
            return Sandbox(self._caller, item.sandbox)
        if item.error is None:
            return InternalError("the server said neither sandbox nor error", index=item.index)
        error = error_of(item.error, 500)
        error.details["index"] = item.index
        return error

    @override
    async def aclose(self) -> None:
        """Stop listening; sandboxes being started go on."""
        await self._items.aclose()


def _argv(argv: Sequence[str]) -> list[str]:
    if isinstance(argv, str):
        raise InvalidRequest("argv must be a list of strings; for a line of shell use run_shell")
    return list(argv)


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _aio.CHUNK_BYTES):
        yield data[start : start + _aio.CHUNK_BYTES]
