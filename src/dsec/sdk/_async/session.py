"""A persistent shell session."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from typing_extensions import override

from dsec.base.errors import NotFound, SandboxGone
from dsec.sdk import _aio
from dsec.sdk._async.call import Caller
from dsec.sdk.models import ExecResult
from dsec.wire.sandbox import SessionView


class _RunShell(Protocol):
    def __call__(
        self,
        command: str,
        *,
        input: bytes | str | None = None,  # noqa: A002 - subprocess.run's name for it
        timeout: float | None = None,
        session: str | None = None,
        command_id: str | None = None,
        output_limit_bytes: int | None = None,
    ) -> Awaitable[ExecResult]: ...


class Session:
    """A shell that keeps directory, variables and functions between commands."""

    def __init__(
        self, caller: Caller, sandbox_path: str, view: SessionView, run_shell: _RunShell
    ) -> None:
        self._caller = caller
        self._path = f"{sandbox_path}/sessions/{view.session_id}"
        self._run_shell = run_shell
        self.view = view

    @property
    def id(self) -> str:
        """Its id."""
        return self.view.session_id

    @override
    def __repr__(self) -> str:
        return f"<Session {self.id}>"

    async def run(
        self,
        command: str,
        *,
        input: bytes | str | None = None,  # noqa: A002 - subprocess.run's name for it
        timeout: float | None = None,
        command_id: str | None = None,
        output_limit_bytes: int | None = None,
    ) -> ExecResult:
        """Run a line in the session's shell; keywords as in `Sandbox.exec`."""
        return await self._run_shell(
            command,
            input=input,
            timeout=timeout,
            session=self.id,
            command_id=command_id,
            output_limit_bytes=output_limit_bytes,
        )

    async def close(self) -> None:
        """End the shell and everything started in it. Harmless twice."""
        with suppress(NotFound, SandboxGone):
            await self._caller.do(self._caller.request("DELETE", self._path))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _aio.finishing(30):
            await self.close()
