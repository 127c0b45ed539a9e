"""Which files of a directory tree processes share by mapping them.

A store into a shared mapping changes a file without any call, and without a trace in its times for
as long as the page was written to already: whoever compares times has to know of such files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

MAX_BYTES = 64 << 20
"""Of the kernel's lists of mappings, some 100 bytes each: a process may have 65,530."""

_LINE = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ ...s [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [0-9]+ +(/.*)$", re.MULTILINE
)
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_WAY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Key = tuple[int, int]
"""Device and inode."""


def shared_files(pids: Iterable[int], tree: Path) -> frozenset[Key]:
    """Files below `tree` that processes have mapped as shared, by device and inode of the tree's.

    The processes' root is taken to mirror the tree, as the root of an overlay mirrors its upper
    directory: what the kernel numbers there is numbered otherwise below, so paths are what counts.
    Mappings that are read-only now count too: they may have been otherwise a moment ago. Processes
    that end meanwhile are passed over, and so is whatever is not in the tree. Blocking.

    Args:
        pids: of the processes, as this process sees them.
        tree: hostile inside; no link in it is followed.

    Raises:
        OverflowError: they have more mappings than anybody looks at (`MAX_BYTES`).
    """
    paths: set[bytes] = set()
    left = MAX_BYTES
    for pid in pids:
        text = _maps(pid, left + 1)
        left -= len(text)
        if left < 0:
            raise OverflowError("more mappings than are looked at")
        # The kernel writes a newline in a name as \012, and nothing else in another way.
        paths.update(_ESCAPE.sub(_byte, match[1]) for match in _LINE.finditer(text))
    return frozenset(key for path in paths if (key := _look_up(tree, path)) is not None)


def _maps(pid: int, most: int) -> bytes:
    try:
        with Path(f"/proc/{pid}/maps").open("rb") as file:
            return file.read(most)
    except OSError:  # it has ended
        return b""


def _byte(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8) & 0xFF])


def _look_up(tree: Path, path: bytes) -> Key | None:
    *parents, name = path.strip(b"/").split(b"/")
    with contextlib.suppress(OSError):
        place = os.open(tree, _WAY)
        try:
            for parent in parents:
                inner = os.open(_plain(parent), _WAY, dir_fd=place)
                os.close(place)
                place = inner
            found = os.stat(_plain(name), dir_fd=place, follow_symlinks=False)
        finally:
            os.close(place)
        return found.st_dev, found.st_ino
    return None


def _plain(name: bytes) -> bytes:
    if name in (b"", b".", b".."):
        raise FileNotFoundError(name)
    return name
