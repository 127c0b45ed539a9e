"""What was tried in a sandbox and did not work: aether's counts, the kernel's, and its own files.

A look from outside: it neither wakes a paused sandbox nor keeps one from being idle.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
from msgspec import Struct, field

from dsec.base.errors import DsecError, SandboxGone, Unsupported
from dsec.base.states import SandboxState
from dsec.edge.backends.interface import Backend, CountsLimitHits, NetworkOf
from dsec.edge.lifecycle.owner import Owner
from dsec.wire.sandbox import DeniedCall, DiffEntry, TamperReport

ASK_DEADLINE_S = 5.0
MAX_FILES = 1000
_DIRECTORIES = ("/bin/", "/sbin/", "/lib", "/usr/")
_SETTINGS = (
    "/etc/passwd", "/etc/shadow", "/etc/group", "/etc/gshadow", "/etc/sudoers", "/etc/ld.so",
    "/etc/profile", "/etc/bash", "/etc/environment", "/etc/pam.d/", "/etc/nsswitch.conf",
    "/etc/security/", "/etc/login.defs", "/etc/shells", "/etc/ssl/",
)  # fmt: skip
_SETTINGS_NAMES = tuple(name.rstrip("/") for name in _SETTINGS)
_OBEYED_BY_ALL = "/etc/ld.so.preload"
_NOT_SYSTEM = ("/usr/local/", "/usr/src/")

Diff = Callable[[Owner], Awaitable[list[DiffEntry]]]


class _Call(DeniedCall, kw_only=True):
    at_agent: bool = False


class _Counts(Struct, kw_only=True):
    """What aether says."""

    counted: bool = False
    simulated: bool = False
    calls: list[_Call] = field(default_factory=list)
    other_calls: int = 0
    flooded_streams: int = 0
    dropped_bytes: int = 0


async def look(owner: Owner, backend: Backend, diff: Diff, now: float) -> TamperReport:
    """Put the report of a live sandbox together.

    Args:
        owner: of the sandbox.
        backend: its own.
        diff: what it has written.
        now: seconds since the epoch.

    Raises:
        SandboxGone: it is over.
    """
    report = TamperReport(at=now)
    said = [await _calls(owner, report), await _files(partial(diff, owner), report)]
    if isinstance(backend, CountsLimitHits):
        hits = await backend.limit_hits(owner.record)
        report.oom_kills, report.pids_limit_hits, report.disk_full = hits
    if owner.record.spec.network and isinstance(backend, NetworkOf):
        report.network = (await backend.network(owner.record)).denied
    report.detail = "; ".join(filter(None, said))
    return report


async def _calls(owner: Owner, report: TamperReport) -> str:
    """Fill in what aether has counted; why not, in words."""
    channel = owner.channel
    if owner.ended_at is not None:
        raise owner.gone()
    if channel is None or owner.state is not SandboxState.RUNNING:
        return "it does not run, and is not asked: what its programs were refused is not known now"
    try:
        with anyio.fail_after(ASK_DEADLINE_S):
            fill(report, await channel.call("tamper"))
    except (DsecError, msgspec.ValidationError, TimeoutError) as exc:
        return f"its aether did not say what its programs were refused: {exc!s:.200}"
    if report.simulated:
        return "simulated: nothing is refused"
    return "" if report.counted else "this host's kernel does not let refused calls be counted"


def fill(report: TamperReport, answer: Any) -> None:
    """Take what aether says into a report."""
    counts = msgspec.convert(answer, _Counts)
    report.counted, report.simulated = counts.counted, counts.simulated
    for call in counts.calls:
        plain = DeniedCall(
            name=call.name,
            argument=call.argument,
            count=call.count,
            first_at=call.first_at,
            last_at=call.last_at,
        )
        (report.agent_signals if call.at_agent else report.denied_calls).append(plain)
    report.other_calls = counts.other_calls
    report.flooded_streams = counts.flooded_streams
    report.dropped_bytes = counts.dropped_bytes


async def _files(diff: Callable[[], Awaitable[list[DiffEntry]]], report: TamperReport) -> str:
    try:
        changed = [entry for entry in await diff() if is_system(entry)]
    except SandboxGone:
        raise
    except Unsupported:
        return "no system file can be compared here"
    except DsecError as exc:
        return f"its files could not be compared: {exc.message}"
    report.system_files = changed[:MAX_FILES]
    report.system_files_count = len(changed)
    return ""


def tells(report: TamperReport) -> bool:
    """Whether there is anything in a report."""
    return any(
        (
            report.denied_calls,
            report.agent_signals,
            report.other_calls,
            report.system_files,
            report.flooded_streams,
            report.oom_kills,
            report.pids_limit_hits,
            report.disk_full,
            report.network,
        )
    )


def has_system(writable: Path) -> bool:
    """Whether a writable layer has anything at all where system files are. Blocks."""
    if any(is_place(f"/{entry.name}") for entry in writable.iterdir() if entry.name != "etc"):
        return True
    # Not followed: what is inside made it.
    etc = writable / "etc"
    if etc.is_symlink() or not etc.is_dir():
        return False
    return any(f"/etc/{entry.name}".startswith(_SETTINGS_NAMES) for entry in etc.iterdir())


def is_place(path: str) -> bool:
    """Whether a top directory is one of the system's."""
    return f"{path}/".startswith(_DIRECTORIES)


def is_system(entry: DiffEntry) -> bool:
    """Whether a change is one of the environment's own programs, libraries or settings.

    What was added is not, but for what every program obeys: an agent that installs a package has done
    nothing strange.
    """
    path = entry.path
    if path == _OBEYED_BY_ALL:
        return True
    if entry.change == "added" or entry.kind == "dir" or path.startswith(_NOT_SYSTEM):
        return False
    return path.startswith((*_DIRECTORIES, *_SETTINGS))
