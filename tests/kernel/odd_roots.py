"""Shapes that the root of a sandbox puts in the place of a directory of its own."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

NAMES = ("hostname", "hosts", "resolv.conf", "machine-id")
"""Files that are written at start where there are none."""


class Outside:
    """A directory of the host that nothing of a sandbox may reach."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        for name in NAMES:
            (home / name).touch()

    def untouched(self) -> bool:
        sizes = {entry.name: entry.stat().st_size for entry in self.home.iterdir()}
        return sizes == dict.fromkeys(NAMES, 0)


def put_aside(place: Path) -> Path:
    """Take a directory away."""
    shutil.rmtree(place, ignore_errors=True)
    return place


def loop(place: Path) -> None:
    """A link to itself."""
    place.symlink_to(place.name)


def _inside(place: Path, outside: Outside) -> None:
    del outside
    (place.parent / "usr/inside").mkdir(parents=True, exist_ok=True)
    place.symlink_to("/usr/inside")


def _socket(place: Path, outside: Outside) -> None:
    del outside
    here = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as made:  # by descriptor: its path may be too long
        made.bind(f"/proc/self/fd/{here}/{place.name}")
    os.close(here)


SHAPES: dict[str, Callable[[Path, Outside], object]] = {
    "link-inside": _inside,
    "link-to-the-root": lambda place, _: place.symlink_to("/"),
    "link-to-a-mount": lambda place, _: place.symlink_to(
        "/proc" if place.name != "proc" else "/sys"
    ),
    "link-out": lambda place, outside: place.symlink_to(outside.home),
    "link-up-and-out": lambda place, outside: place.symlink_to(f"{'../' * 40}{outside.home}"),
    "link-dangling": lambda place, _: place.symlink_to("/no/where"),
    "link-loop": lambda place, _: loop(place),
    "link-too-long": lambda place, _: place.symlink_to("x" * 300),
    "file": lambda place, _: place.write_text("mine"),
    "empty-file": lambda place, _: place.touch(),
    "pipe": lambda place, _: os.mkfifo(place),
    "socket": _socket,
}
