"""The front a worker makes of what its keeper handed down."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from dsec.images.lazy.config import FillerConfig, FrontName
from dsec.images.lazy.front_fanotify import FanotifyFront
from dsec.images.lazy.front_fuse import FuseFront
from dsec.images.lazy.handed import Handed
from dsec.images.lazy.interface import Front
from dsec.images.lazy.places import Places
from dsec.linux import fanotify
from dsec.linux.process import die_with_parent


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
    for descriptor in (handed.kernel, handed.pulse):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
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
