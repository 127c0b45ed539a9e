"""A directory into an EROFS image.

What is asked of mkfs.erofs and why:

- no `-T`: in 1.5 it flattens every file's mtime; without it they are kept.
- uncompressed with `-E noinline_data`: file data lies on whole blocks, so the image can be mapped
  straight into a guest later.
- a fixed `-U`: nothing reads it, and one thing less differs between two builds.
- xattrs are kept (the default): layers need `trusted.overlay.opaque`, files `security.capability`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsec.base.errors import InternalError, Unsupported
from dsec.images.disk import storage_full
from dsec.kit.blocking import in_thread
from dsec.linux.process import CommandFailed, run, run_async

_UUID = "d5ec0000-0000-4000-8000-000000000000"
_TIMEOUT_S = 3600.0
_VERSION = re.compile(r"mkfs\.erofs\D{0,20}?(\d+(?:\.\d+)+)")
ADVICE = "install Debian's package erofs-utils"


def parse_version(text: str) -> str:
    """The version in what mkfs.erofs prints, "" if there is none."""
    match = _VERSION.search(text)
    return match[1] if match else ""


def detect_version() -> str:
    """The version of mkfs.erofs, from a worker thread.

    1.5 has no option for it, but prints it with any complaint; later ones answer `--version`.

    Raises:
        Unsupported: mkfs.erofs is missing or says nothing of a version.
    """
    try:
        done = run(["mkfs.erofs", "--version"], timeout_s=10.0)
        said = done.stdout.decode("utf-8", "replace") + done.stderr
    except CommandFailed as failure:
        said = failure.stderr + failure.stdout
    except FileNotFoundError:
        raise Unsupported("mkfs.erofs is not installed", advice=ADVICE) from None
    if version := parse_version(said):
        return version
    raise Unsupported("mkfs.erofs does not say which version it is", advice=ADVICE)


def command(tree: Path, image: Path) -> list[str]:
    """The command that makes `image` from `tree`."""
    return ["mkfs.erofs", "--quiet", f"-U{_UUID}", "-Enoinline_data", str(image), str(tree)]


async def build(tree: Path, image: Path) -> None:
    """Make an EROFS image of a directory; cancelling kills mkfs.erofs.

    Args:
        tree: the directory; owners, modes, times, devices, hard links and xattrs are kept.
        image: a file that does not exist yet.

    Raises:
        Unsupported: mkfs.erofs is missing, or cannot take a name as long as one here.
        StorageFull: no room for the image.
        InternalError: mkfs.erofs failed otherwise; the message has its command.
    """
    try:
        await run_async(command(tree, image), timeout_s=_TIMEOUT_S)
    except FileNotFoundError:
        raise Unsupported("mkfs.erofs is not installed", advice=ADVICE) from None
    except CommandFailed as failure:
        if "No space left" in failure.stderr or "Disk quota" in failure.stderr:
            raise storage_full(image) from failure
        if name := await in_thread("scan", find_longest_name, tree):
            raise Unsupported(
                f"the image has a name of 255 bytes, which this mkfs.erofs cuts: {name[:40]!r}...",
                advice="install a newer erofs-utils; 1.5 takes 254 bytes",
            ) from failure
        raise InternalError(str(failure)) from failure


def find_longest_name(tree: Path) -> str:
    """A name of 255 bytes, the kernel's limit, in a tree; "" if there is none. Blocking."""
    for _, directories, files in os.walk(tree):
        for name in (*directories, *files):
            if len(os.fsencode(name)) == 255:
                return ascii(name)[1:-1]
    return ""
