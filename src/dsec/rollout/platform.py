"""The part of the SDK a rollout uses, as protocols: what a stand-in has to offer in a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol


class Ran(Protocol):
    """A command that has ended; see `ExecResult` in docs/reference/sdk.md."""

    @property
    def exit_code(self) -> int | None:
        """Exit status."""

    @property
    def stdout(self) -> str:
        """Standard output, as text."""

    @property
    def stderr(self) -> str:
        """Standard error, as text."""

    @property
    def timed_out(self) -> bool:
        """Whether its time limit ended it."""

    @property
    def oom_killed(self) -> bool:
        """Whether it was killed for want of memory."""

    @property
    def truncated(self) -> bool:
        """Whether some of its output was left out."""


class TarStream(Protocol):
    """A tar as it arrives; to be closed when it is not read to its end."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Let go of the connection."""


class Files(Protocol):
    """A sandbox's files."""

    async def write(self, path: str, data: Any, /, *, mode: int = ..., parents: bool = ...) -> Any:
        """Write a whole file."""

    async def read(self, path: str, /, *, length: int | None = ...) -> bytes:
        """Read a file, or so many bytes of it."""

    async def mkdir(self, path: str, /, *, parents: bool = ...) -> Any:
        """Make a directory."""

    async def put_tar(self, path: str, chunks: AsyncIterator[bytes], /) -> Any:
        """Unpack a tar stream below a directory."""

    def get_tar(self, path: str, /) -> TarStream:
        """A directory as a tar stream."""


class Used(Protocol):
    """What a sandbox uses."""

    memory_bytes: int
    memory_peak_bytes: int


class SandboxLike(Protocol):
    """A running sandbox."""

    @property
    def id(self) -> Any:
        """Its id."""

    @property
    def files(self) -> Files:
        """Its files."""

    async def run_shell(
        self,
        command: str,
        /,
        *,
        cwd: str | None = ...,
        env: Mapping[str, str] | None = ...,
        timeout: float | None = ...,
        command_id: str | None = ...,
        output_limit_bytes: int | None = ...,
    ) -> Ran:
        """Run a command line."""

    async def exec(
        self,
        argv: Sequence[str],
        /,
        *,
        timeout: float | None = ...,
        command_id: str | None = ...,
        output_limit_bytes: int | None = ...,
    ) -> Ran:
        """Run a program."""

    async def usage(self) -> Used:
        """Measure it."""

    async def stop(self) -> Any:
        """End it."""


class ClientLike(Protocol):
    """Where sandboxes come from."""

    async def run_container(self, args: Any, /, *, timeout: float = ...) -> SandboxLike:
        """Start one and wait until it is ready."""
