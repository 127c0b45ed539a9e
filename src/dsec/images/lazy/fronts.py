"""What a keeper hands to its worker, and the front the worker makes of it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dsec.base.errors import InternalError
from dsec.images.lazy.config import FillerConfig, FrontName
from dsec.images.lazy.front_fanotify import FanotifyFront
from dsec.images.lazy.front_fuse import FuseFront
from dsec.images.lazy.interface import Front
from dsec.linux import fanotify
from dsec.linux.process import die_with_parent

VARIABLE = "DSEC_FILLER_FDS"


@dataclass(frozen=True, slots=True)
class Places:
    """The keeper's files."""

    home: Path
    """`<run>/filler`."""

    @property
    def lock(self) -> Path:
        """Held by the keeper; says who it is."""
        return self.home / "lock"

    @property
    def log(self) -> Path:
        """Output of keeper and worker."""
        return self.home / "log"

    @property
    def data(self) -> Path:
        """Where devices are shown by FUSE."""
        return self.home / "data"

    @property
    def config(self) -> Path:
        """What the edge wants the filler to be."""
        return self.home / "config.json"


@dataclass(frozen=True, slots=True)
class Handed:
    """What a worker inherits."""

    kernel: int
    """The FUSE connection, mounted and greeted, or the fanotify group."""
    generation: int
    """How many workers had it before."""
    parent: int
    """The keeper."""

    def encode(self) -> str:
        """As the environment has it."""
        return f"kernel={self.kernel},generation={self.generation},parent={self.parent}"

    @classmethod
    def decode(cls, environ: Mapping[str, str]) -> Self:
        """Read it.

        Raises:
            InternalError: the keeper has not started this process.
        """
        pairs = dict(part.partition("=")[::2] for part in environ.get(VARIABLE, "").split(","))
        try:
            return cls(int(pairs["kernel"]), int(pairs["generation"]), int(pairs["parent"]))
        except (KeyError, ValueError) as error:
            raise InternalError(f"{VARIABLE} is not what a keeper gives its worker") from error


@contextlib.contextmanager
def open_front(config: FillerConfig, environ: Mapping[str, str] = os.environ) -> Iterator[Front]:
    """Take over what the keeper handed down. From now on this process dies with it.

    Expose what is to be seen, then enter `Front.serving`.

    Raises:
        InternalError: the keeper has not started this process.
        ProcessLookupError: the keeper is gone already.
    """
    handed = Handed.decode(environ)
    die_with_parent(handed.parent)
    os.set_inheritable(handed.kernel, False)
    with contextlib.suppress(OSError):  # unlike the keeper, this process can be replaced
        Path("/proc/self/oom_score_adj").write_text("0")
    try:
        yield _front(config.front, Places(config.home).data, handed)
    finally:
        os.close(handed.kernel)


def _front(name: FrontName, mount_point: Path, handed: Handed) -> Front:
    if name == "fuse":
        return FuseFront(handed.kernel, mount_point, handed.generation)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = fanotify.MAX_DESCRIPTORS if most < 0 else min(most, fanotify.MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    return FanotifyFront(handed.kernel, handed.generation)
