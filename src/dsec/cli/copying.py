"""The verb cp: files and trees between this machine and a sandbox."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

import anyio
import typer

from dsec.base.errors import InvalidRequest, NotFound
from dsec.base.quantity import format_size
from dsec.cli.boundary import client, verb
from dsec.cli.output import clean, note
from dsec.sdk import FileInfo, Progress, Sandbox

CHUNK_BYTES = 256 << 10
STREAM = "-"
LEFT_OUT_SHOWN = 10
INCOMPLETE = 1


@dataclass(frozen=True)
class Place:
    """One end of a copy: a path here, or in a sandbox."""

    sandbox: str | None
    path: str

    @property
    def contents(self) -> bool:
        """Whether what is in the directory is meant, not the directory."""
        return self.path.endswith(("/.", "/"))


def place(text: str) -> Place:
    """`sbx...:/path` is in a sandbox; `./name:with-colon` is not."""
    head, colon, path = text.partition(":")
    if colon and head.startswith("sbx") and "/" not in head:
        return Place(head, path or ".")
    return Place(None, text)


@verb
async def cp(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Path, SANDBOX:PATH, or -.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Path, SANDBOX:PATH, or -.")],
    *,
    user: Annotated[str | None, typer.Option("--user", "-u", help="Who owns it there.")] = None,
) -> int:
    """Copy files and directories between this machine and a sandbox.

    What a copy to this machine had to leave out is said, and the exit status is then 1. A directory goes into the target if that is there, else becomes it; FROM/. means what is in it.
    With -, a tar stream is read from standard input or written to standard output.

    Examples:
      dsec cp report.txt sbx...:/root/

      dsec cp sbx...:/repo/out ./results

      tar c . | dsec cp - sbx...:/repo
    """
    here, there = place(source), place(target)
    if (here.sandbox is None) == (there.sandbox is None):
        raise InvalidRequest("one of FROM and TO is in a sandbox (SANDBOX:PATH), the other here")
    async with client() as dsec:
        if there.sandbox is not None:
            await _upload(await dsec.get(there.sandbox), here, there, user)
            return 0
        return await _download(await dsec.get(here.sandbox or ""), here, there, user)


async def _upload(sandbox: Sandbox, here: Place, there: Place, user: str | None) -> None:
    if here.path == STREAM:
        await sandbox.files.put_tar(there.path, _standard_input(), user=user)
        return
    local, mode = _examine(here.path)
    path = there.path
    if not here.contents and (path.endswith("/") or await _is_dir(sandbox, path, user)):
        path = str(PurePosixPath(path, local.name))
    with _counting() as progress:
        if stat.S_ISDIR(mode):
            await sandbox.files.upload_tree(local, path, user=user, progress=progress)
        else:
            await sandbox.files.write(path, local, mode=stat.S_IMODE(mode) & 0o777, user=user)


def _examine(path: str) -> tuple[Path, int]:
    """A local path with a name of its own, and its mode."""
    local = Path(path)
    try:
        return (local if local.name not in {"", ".."} else local.resolve()), local.stat().st_mode
    except FileNotFoundError:
        raise NotFound(f"no file or directory {path}", kind="local_path") from None


async def _is_dir(sandbox: Sandbox, path: str, user: str | None) -> bool:
    try:
        return (await sandbox.files.stat(path, user=user)).is_dir
    except NotFound:
        return False


async def _download(sandbox: Sandbox, here: Place, there: Place, user: str | None) -> int:
    if there.path == STREAM:
        async with sandbox.files.get_tar(here.path, user=user) as stream:
            async for data in stream:
                sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return 0
    info = await sandbox.files.stat(here.path, user=user)
    local = _destination(here, there)
    if info.is_dir:
        return await _download_tree(sandbox, here.path, local, user)
    if not info.is_file:
        raise InvalidRequest(f"{here.path} is a {info.kind}, not a file or directory")
    await _download_file(sandbox, info, here.path, local, user)
    return 0


def _destination(here: Place, there: Place) -> Path:
    local = Path(there.path)
    return local / _plain_name(here.path) if local.is_dir() and not here.contents else local


def _plain_name(path: str) -> str:
    name = PurePosixPath(path).name
    if name in {"", ".", ".."}:
        raise InvalidRequest(f"{path} has no name to copy it under; say one")
    return name


async def _download_tree(sandbox: Sandbox, path: str, local: Path, user: str | None) -> int:
    with _counting() as progress:
        done = await sandbox.files.download_tree(path, local, user=user, progress=progress)
    for name, reason in done.skipped[:LEFT_OUT_SHOWN]:
        note(f"left out: {name}: {reason}")
    if (more := len(done.skipped) - LEFT_OUT_SHOWN) > 0:
        note(f"left out: {more} more; `dsec cp FROM - | tar x` has them all")
    return INCOMPLETE if done.skipped else 0


async def _download_file(
    sandbox: Sandbox, info: FileInfo, path: str, local: Path, user: str | None
) -> None:
    if not local.parent.is_dir():
        raise NotFound(f"no directory {local.parent}", kind="local_path")
    part = local.with_name(f".{local.name}.{os.getpid()}.part")
    done = 0
    try:
        with _counting() as progress:
            async with await anyio.open_file(part, "wb") as file:
                async with sandbox.files.stream(path, user=user) as stream:
                    async for data in stream:
                        await file.write(data)
                        done += len(data)
                        progress(Progress(path, done, info.size_bytes))
        part.chmod(info.mode & 0o777)
        part.replace(local)
    finally:
        part.unlink(missing_ok=True)


async def _standard_input() -> AsyncIterator[bytes]:
    descriptor = sys.stdin.fileno()
    while True:
        with suppress(OSError):  # a file cannot be waited for, and need not be
            await anyio.wait_readable(descriptor)
        data = os.read(descriptor, CHUNK_BYTES)
        if not data:
            return
        yield data


@contextmanager
def _counting() -> Iterator[Callable[[Progress], None]]:
    """How far it is, in one line that goes away; nothing when nobody watches."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    shown = ""

    def show(progress: Progress) -> None:
        nonlocal shown
        text = f"{format_size(progress.done_bytes)}  {clean(progress.path)}"[:78]
        if text != shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            shown = text

    try:
        yield show
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
