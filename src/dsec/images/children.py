"""Child processes of this program for foreign bytes: how they begin, what they say, what they lose.

A child is a module of the package. It is told `--parent PID`, answers in JSON on its standard
output, and says `Refused` where a function would raise an error of the tree.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

import dsec
from dsec.base.errors import DsecError, error_from
from dsec.linux.process import Completed, LineSink, run_async

NOBODY = 65534
_NICE = 10
"""A sandbox that wants the processor comes first."""


class Refused(Struct, tag="refused"):
    """An error of the tree in `dsec.base.errors`."""

    code: str
    message: str

    def error(self) -> DsecError:
        """It, to be raised by the parent."""
        return error_from(self.code, self.message)


def refusal(error: DsecError) -> Refused:
    """An error as the child says it; names from foreign bytes need not be Unicode."""
    return Refused(error.code, error.message.encode("utf-8", "backslashreplace").decode())


async def run_child(
    module: str,
    arguments: Sequence[str] = (),
    *,
    stdin: bytes | None = None,
    timeout_s: float,
    on_line: LineSink | None = None,
) -> Completed:
    """Run a module of this program to its end; cancelling kills it.

    Args:
        module: its full name.
        arguments: what comes after `--parent PID`.
        stdin: what it reads; nothing if not given.
        timeout_s: when to kill it.
        on_line: called with each line it says.

    Raises:
        CommandFailed: it exited non-zero, was killed, or ran longer than `timeout_s`.
    """
    argv = [sys.executable, "-X", "utf8", "-m", module, "--parent", str(os.getpid()), *arguments]
    return await run_async(
        argv, stdin=stdin, timeout_s=timeout_s, env=_environment(), on_stdout_line=on_line
    )


def _environment() -> dict[str, str]:
    """Only what Python and zstd need; the package is found wherever this process found it."""
    package = Path(dsec.__path__[0]).parent
    return {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(package)}


# -- in the child ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a child may take."""

    memory_bytes: int
    """Of address space; what goes beyond is a `MemoryError`."""
    cpu_s: int | None = None
    """Processor time; what goes beyond is killed by SIGXCPU."""


def confine(bounds: Bounds) -> None:
    """Bound this process, and let others go first."""
    _limit(resource.RLIMIT_AS, bounds.memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    if bounds.cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (bounds.cpu_s, bounds.cpu_s + 5))
    os.nice(_NICE)
    os.umask(0o077)


def _limit(which: int, value: int) -> None:
    resource.setrlimit(which, (value, value))


def become_nobody() -> None:
    """Give up root, if that is what this process is. Ask to die with the parent after it."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
