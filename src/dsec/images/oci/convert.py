"""Runs the extraction child (`extract.py`) and hands on what it says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import dsec
from dsec.base.errors import InternalError, error_from
from dsec.images.oci.extract import Extracted, Progress, Refused, Said
from dsec.images.oci.source import Blob
from dsec.images.oci.tree import Limits
from dsec.linux.process import CommandFailed, run_async

_TIMEOUT_S = 6 * 3600.0


@dataclass(slots=True)
class _Listener:
    on_progress: Callable[[int], None]
    last: Extracted | Refused | None = field(default=None)

    def hear(self, line: str) -> None:
        said = msgspec.json.decode(line.encode(), type=Said)
        match said:
            case Progress(done):
                self.on_progress(done)
            case Extracted() | Refused():
                self.last = said


def command(
    stage: Path, blob: Blob, lowers: Sequence[Path], limits: Limits, *, need_end: bool
) -> list[str]:
    """The command that extracts a blob into `<stage>/new`; lower images topmost first."""
    return [
        *(sys.executable, "-X", "utf8", "-m", "dsec.images.oci.extract"),
        *("--stage", str(stage), "--blob", str(blob.path)),
        *("--offset", str(blob.offset), "--size", str(blob.size)),
        *("--max-entries", str(limits.entries), "--max-bytes", str(limits.size_bytes)),
        *(word for lower in lowers for word in ("--lower", str(lower))),
        *(["--need-end"] if need_end else []),
    ]


def _environment() -> dict[str, str]:
    """Only what Python and zstd need; the package is found wherever this process found it."""
    package = Path(dsec.__path__[0]).parent
    return {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(package)}


async def extract(
    stage: Path,
    blob: Blob,
    lowers: Sequence[Path],
    limits: Limits,
    on_progress: Callable[[int], None],
    *,
    need_end: bool,
) -> Extracted:
    """Extract a layer's blob into `<stage>/new`; cancelling kills the child.

    Args:
        stage: an empty directory.
        blob: the tar, compressed or not.
        lowers: EROFS images of the layers below, topmost first.
        limits: how much it may hold.
        on_progress: called with the bytes of the blob read so far.
        need_end: refuse a tar without its end mark: for one that no digest vouches for.

    Raises:
        InvalidRequest: the tar is cut short, damaged or hostile.
        PayloadTooLarge: it exceeds the limits.
        StorageFull: no room.
        Unsupported: it is compressed with zstd, which is not installed.
        InternalError: the child failed otherwise; the message has its command.
    """
    listener = _Listener(on_progress)
    argv = command(stage, blob, lowers, limits, need_end=need_end)
    try:
        await run_async(
            [*argv, "--parent", str(os.getpid())],
            timeout_s=_TIMEOUT_S,
            env=_environment(),
            on_stdout_line=listener.hear,
        )
    except CommandFailed as failure:
        raise InternalError(str(failure)) from failure
    match listener.last:
        case Extracted() as extracted:
            return extracted
        case Refused(code, message):
            raise error_from(code, message)
        case None:
            raise InternalError(f"`{' '.join(argv)}` said nothing")
