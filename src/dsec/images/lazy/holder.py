"""The keeper's lock: one per node, and it says who holds it."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from dsec.images.lazy.config import FillerConfig, FrontName

_TEXT_BYTES = 256


class Holder(Struct, kw_only=True, frozen=True):
    """The keeper that runs."""

    pid: int
    config: str
    """Digest of the settings its worker has."""
    front: FrontName
    inherited: bool = False
    """What an earlier keeper had mounted is good: its fanotify group is this one's."""
    resting: bool = False
    """It has given up on its worker and waits for SIGHUP; reads fail."""


def digest_of(config: FillerConfig) -> str:
    """What settings are told apart by."""
    return hashlib.sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()


class Lock:
    """The lock, held from the start to `close`, or to the end of the process."""

    def __init__(self, path: Path) -> None:
        """Take it.

        Raises:
            BlockingIOError: another has it.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, holder: Holder) -> None:
        """Say who holds it."""
        # In one write and of one length: a look in between finds the old text or the new.
        os.pwrite(self._file, msgspec.json.encode(holder).ljust(_TEXT_BYTES), 0)

    def close(self) -> None:
        """Give it up."""
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_held(path: Path) -> bool:
    """Whether a keeper runs, or is just starting or ending."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock; None if nobody does, or does not say so yet."""
    if not is_held(path):
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None
