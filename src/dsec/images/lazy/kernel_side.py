"""What a keeper opens and keeps open: the FUSE connection and its mount, or the fanotify group."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from dsec.base.errors import Unavailable, Unsupported
from dsec.images.lazy.anchored import AnchoredGroup, is_anchored
from dsec.images.lazy.config import FrontName
from dsec.images.lazy.places import Places
from dsec.linux import fanotify, fuse, mounts

_ANCHOR_TRIES, _ANCHOR_PAUSE_S = 60, 0.05
"""An anchor that is not needed any more takes a moment to see it."""

logger = logging.getLogger("dsec.filler.keeper")


class KernelSide(Protocol):
    """What is held."""

    @property
    def descriptor(self) -> int:
        """The worker serves it."""
        ...

    @property
    def connection(self) -> int | None:
        """The worker has it open while it lives, and knows nothing of it."""
        ...

    @property
    def inherited(self) -> bool:
        """Whether an earlier keeper had it: what is mounted over it is good."""
        ...

    def renew_anchor(self) -> bool:
        """Whether `connection` had to be made anew: then the worker needs the new one."""
        ...


class FuseConnection:
    """Ends with its keeper: reads fail then."""

    connection = None
    inherited = False

    def __init__(self, descriptor: int) -> None:
        """Of a mount that was greeted."""
        self.descriptor = descriptor

    def renew_anchor(self) -> bool:
        """It has none."""
        return False


@contextlib.contextmanager
def opened(front: FrontName, places: Places, cache: Path) -> Iterator[KernelSide]:
    """Hold it while the context lasts; at the end reads fail.

    Raises:
        Unsupported: this host has no such front.
        Unavailable: somebody still stands on what the other front showed.
    """
    if front == "fanotify":
        with contextlib.closing(_group(places, cache)) as group:
            yield group
        return
    _wait_unanchored(places.anchor)
    with mounted(places.data) as descriptor:
        yield FuseConnection(descriptor)


def _wait_unanchored(path: Path) -> None:
    """The cache must not be read through FUSE while an anchor denies to read it."""
    for _ in range(_ANCHOR_TRIES):
        if not is_anchored(path):
            return
        time.sleep(_ANCHOR_PAUSE_S)  # noqa: TID251 - the keeper has no loop
    raise Unavailable("mounts that were made through fanotify live on: end their sandboxes")


def _group(places: Places, cache: Path) -> AnchoredGroup:
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := fanotify.fanotify_available(cache):
        raise Unsupported(f"data cannot be shown by fanotify: {reason}")
    return AnchoredGroup(places.anchor, cache)


@contextlib.contextmanager
def mounted(data: Path) -> Iterator[int]:
    """A FUSE connection, mounted and greeted.

    Raises:
        Unsupported: this host has no FUSE.
    """
    data = data.parent.resolve() / data.name
    detach_all(data)
    data.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = fuse.open_device()
    except OSError as error:
        raise Unsupported(f"data cannot be shown by FUSE: {error.filename}: {error}") from error
    try:
        _mount(descriptor, data)
        yield descriptor
    finally:
        detach_all(data)
        os.close(descriptor)  # those who still have a file of it open see EIO


def _mount(descriptor: int, data: Path) -> None:
    try:
        fuse.mount_device(descriptor, data)
        fuse.greet(descriptor)
    except OSError as error:
        raise Unsupported(f"data cannot be shown by FUSE: {error}") from error


def detach_all(target: Path) -> None:
    """Take away what is mounted here, also a dead keeper's mount, which cannot even be looked at."""
    while mounts.is_mounted(target):
        logger.info("taking away a mount", extra={"path": str(target)})
        mounts.umount(target, detach=True)
