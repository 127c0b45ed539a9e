"""The other way: download whole compressed layers and unpack them to the node's disk.

As Docker does, without what Docker's own engine costs besides: a layer streams from the link
through the decompressor into `tar`, nothing is written twice, and nothing is synced. A sandbox on
it is an overlay in a mount and process name space of its own, entered with `chroot`: one process,
no control groups, no user ids of its own, no API in between. All of that favours this side.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import anyio

from bench.corpus import gzip
from dsec.kit.blocking import in_thread

_IN_SANDBOX = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/root"
mount -t overlay overlay -o "lowerdir=$2,upperdir=$3/upper,workdir=$3/work" "$1/root"
mount -t proc proc "$1/root/proc"
exec chroot "$1/root" "${@:4}"
"""


async def fetch_and_unpack(url: str, directory: Path) -> None:
    """Download a layer and unpack it into a directory that does not exist yet."""
    await in_thread("disk", lambda: directory.mkdir(parents=True))
    pipe = (
        f"curl -sSf {shlex.quote(url)} | {gzip()} -dc | "
        f"tar -x -p --numeric-owner -C {shlex.quote(str(directory))}"
    )
    await anyio.run_process(["bash", "-o", "pipefail", "-c", pipe], stderr=None)


async def run_in(layers: Sequence[Path], place: Path, command: Sequence[str]) -> bytes:
    """Make a sandbox of layers (topmost first), run a command in it, and let it end.

    Args:
        layers: unpacked.
        place: where the sandbox writes; made.
        command: what runs.

    Returns:
        What it printed.

    Raises:
        CalledProcessError: it failed.
    """
    await in_thread("disk", _prepare, place)
    lower = ":".join(map(str, layers))
    argv = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child"]
    argv += ["bash", "-c", _IN_SANDBOX, "bash", str(place / "mnt"), lower, str(place), *command]
    ended = await anyio.run_process(argv, stdin=subprocess.DEVNULL)
    return ended.stdout


def _prepare(place: Path) -> None:
    for part in ("upper", "work", "mnt"):
        (place / part).mkdir(parents=True)
