"""Swap for as long as something is measured or tested, where the host has none."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsec.linux import hostinfo


@contextlib.contextmanager
def swap(size_mb: int, directory: Path | None = None) -> Iterator[str]:
    """Have at least so much free swap; what had to be made is gone afterwards.

    Args:
        size_mb: of the swap file, if one is needed.
        directory: on a disk that can hold one (ext4, xfs; not tmpfs); None = the one for scratch.

    Yields:
        What there is, in words.

    Raises:
        CalledProcessError: it may not be made here.
    """
    if hostinfo.memory().swap_free_bytes >= size_mb << 20:
        yield "the host's own"
        return
    descriptor, name = tempfile.mkstemp(prefix="dsec-swap-", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_mb << 20)
        _run("mkswap", name)
        _run("swapon", name)
        try:
            yield f"a file of {size_mb} MiB"
        finally:
            _run("swapoff", name)
    finally:
        Path(name).unlink()


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
