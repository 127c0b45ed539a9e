"""What a keeper opens and keeps open: the FUSE connection and its mount, or the fanotify group."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from dsec.base.errors import Unsupported
from dsec.images.lazy.config import FrontName
from dsec.linux import fanotify, fuse, mounts

logger = logging.getLogger("dsec.filler.keeper")


@contextlib.contextmanager
def opened(front: FrontName, data: Path, cache: Path) -> Iterator[int]:
    """The descriptor the worker serves; at the end, reads fail (FUSE) or go through (fanotify).

    Raises:
        Unsupported: this host has no such front.
    """
    if front == "fanotify":
        with _group(cache) as descriptor:
            yield descriptor
    else:
        with _mounted(data) as descriptor:
            yield descriptor


@contextlib.contextmanager
def _group(cache: Path) -> Iterator[int]:
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := fanotify.fanotify_available(cache):
        raise Unsupported(f"data cannot be shown by fanotify: {reason}")
    descriptor = fanotify.open_group()
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _mounted(data: Path) -> Iterator[int]:
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
