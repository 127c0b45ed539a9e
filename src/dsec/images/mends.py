"""What mounted layers make of directories, for the plan of mends (`compose.plan_mends`)."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from dsec.images.compose import HiddenError, plan_mends
from dsec.images.erofs.scan import is_opaque, opened_directory
from dsec.images.records import DirectoryMark


def find_mends(layers: Sequence[Path], implied: Sequence[Sequence[str]]) -> list[DirectoryMark]:
    """Plan the mends of an environment. Blocking: some calls per path and layer.

    Args:
        layers: mounted, topmost first.
        implied: directories that each of them says nothing about.

    Raises:
        OSError: a layer cannot be read.
    """
    return plan_mends(implied, lambda number, path: look(layers[number], path))


def look(layer: Path, path: str) -> DirectoryMark | None:
    """What a mounted layer has under an absolute path: a directory, or None for nothing.

    Raises:
        HiddenError: something else in it hides what is below.
        OSError: it cannot be read.
    """
    hides = False
    with contextlib.ExitStack() as opened:
        place = opened.enter_context(opened_directory(str(layer)))
        for name in filter(None, path.split("/")):
            hides |= is_opaque(place)
            try:
                place = opened.enter_context(opened_directory(name, place))
            except FileNotFoundError:
                if hides:
                    raise HiddenError from None
                return None
            except NotADirectoryError:  # a whiteout or a symbolic link too
                raise HiddenError from None
        return _mark(path, os.fstat(place))


def _mark(path: str, found: os.stat_result) -> DirectoryMark:
    mode = stat.S_IMODE(found.st_mode)
    return DirectoryMark(path=path, mode=mode, uid=found.st_uid, gid=found.st_gid)
