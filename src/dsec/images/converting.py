"""Runs the conversion child (`convert`) and hands on what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dsec.base.errors import InternalError
from dsec.images.children import Refused, run_child
from dsec.images.convert import DATA, META, Converted, Implied, Progress, Said
from dsec.images.oci.layer import Limits
from dsec.images.oci.source import Blob
from dsec.images.store.interface import nothing
from dsec.linux.process import CommandFailed

__all__ = ["DATA", "META", "Converted", "convert_directory", "convert_merge", "convert_tar"]

_TIMEOUT_S = 6 * 3600.0


async def convert_tar(
    out: Path,
    blob: Blob,
    lowers: Sequence[Path],
    limits: Limits,
    on_progress: Callable[[int], None],
    *,
    need_end: bool,
) -> Converted:
    """Convert a layer's tar; cancelling kills the child.

    Args:
        out: an empty directory; `META` and, if a file has content, `DATA` in it are the result.
        blob: the tar, compressed or not.
        lowers: metadata images of the layers below, bottom first.
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
    what = [
        *("tar", "--blob", str(blob.path)),
        *("--offset", str(blob.offset), "--size", str(blob.size)),
        *(["--need-end"] if need_end else []),
    ]
    return await _run([*_limited(out, limits), *what, "--", *map(str, lowers)], on_progress)


async def convert_directory(
    out: Path, directory: Path, limits: Limits, on_progress: Callable[[int], None]
) -> Converted:
    """Convert a directory of this host; equal ones get equal digests. Cancelling kills the child.

    Args:
        out: an empty directory; see `convert_tar`.
        directory: not a symbolic link. Owners, modes, times, devices, links, holes and xattrs are
            kept.
        limits: how much it may hold.
        on_progress: called with the bytes of its files read so far.

    Raises:
        InvalidRequest: a file system is mounted inside, or something changed while it was read.
        PayloadTooLarge: it exceeds the limits.
        StorageFull: no room.
        InternalError: the child failed otherwise; the message has its command.
    """
    argv = [*_limited(out, limits), "directory", "--", str(directory)]
    return await _run(argv, on_progress)


async def convert_merge(out: Path, images: Sequence[Path], *, keep_whiteouts: bool) -> Converted:
    """Merge layers into one metadata image; their data stays where it is.

    Args:
        out: an empty directory; `META` in it is the result.
        images: metadata images of at least one layer, bottom first.
        keep_whiteouts: other layers will lie below.

    Raises:
        PayloadTooLarge: they need too much memory.
        StorageFull: no room.
        InternalError: an image is damaged, or the child failed; the message has its command.
    """
    keep = ["--keep-whiteouts"] if keep_whiteouts else []
    return await _run(["--out", str(out), "merge", *keep, "--", *map(str, images)], nothing)


def _limited(out: Path, limits: Limits) -> list[str]:
    return [
        *("--out", str(out)),
        *("--max-entries", str(limits.entries), "--max-bytes", str(limits.size_bytes)),
    ]


@dataclass(slots=True)
class _Listener:
    on_progress: Callable[[int], None]
    last: Converted | Refused | None = None
    implied: list[str] = field(default_factory=list)

    def hear(self, line: str) -> None:
        said = msgspec.json.decode(line.encode(), type=Said)
        match said:
            case Progress(done):
                self.on_progress(done)
            case Implied(path):
                self.implied.append(path)
            case Converted():
                self.last = msgspec.structs.replace(said, implied=self.implied)
            case Refused():
                self.last = said


async def _run(arguments: Sequence[str], on_progress: Callable[[int], None]) -> Converted:
    listener = _Listener(on_progress)
    try:
        done = await run_child(
            "dsec.images.convert", arguments, timeout_s=_TIMEOUT_S, on_line=listener.hear
        )
    except CommandFailed as failure:
        raise InternalError(str(failure)) from failure
    match listener.last:
        case Converted() as converted:
            return converted
        case Refused() as refused:
            raise refused.error()
        case None:
            raise InternalError(f"`{' '.join(done.argv)}` said nothing")
