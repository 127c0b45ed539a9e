"""An EROFS image over a data device, readers in processes of their own, and what they must read."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec.linux import mounts

FILES, FILE_BYTES = 24, 1 << 19
READ = """
import hashlib, os, random, sys
root, seed = sys.argv[1:]
names = sorted(os.listdir(root))
random.Random(seed).shuffle(names)
for name in names:
    try:
        with open(os.path.join(root, name), "rb") as file:
            print(name, hashlib.sha256(file.read()).hexdigest(), flush=True)
    except OSError as error:
        print(name, f"errno {error.errno}", flush=True)
"""
MAP = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
    sys.stdout.buffer.write(bytes(view))
"""


@dataclass(frozen=True)
class Image:
    meta: Path
    blob: Path
    tree: Path

    def digests(self) -> dict[str, str]:
        return {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in self.tree.iterdir()
        }


def make_image(place: Path) -> Image:
    """Some megabytes of noise and a program."""
    image = Image(place / "meta.erofs", place / "blob", place / "tree")
    image.tree.mkdir(parents=True)
    noise = random.Random(1)
    for number in range(FILES):
        # No chunk of zeros, and none twice: each has its own place in the blob.
        (image.tree / f"file{number:02}").write_bytes(noise.randbytes(FILE_BYTES + number * 4096))
    shutil.copy("/bin/cat", image.tree / "program")
    argv = ["mkfs.erofs", "--quiet", "--chunksize=65536", f"--blobdev={image.blob}"]
    subprocess.run([*argv, str(image.meta), str(image.tree)], check=True, capture_output=True)
    size = image.blob.stat().st_size
    os.truncate(image.blob, -(-size // 4096) * 4096)
    return image


@contextmanager
def mounted(image: Image, device: Path, target: Path) -> Iterator[Path]:
    """Mount it over a device; from a thread or process that does not serve the device."""
    target.mkdir(exist_ok=True)
    mounts.mount_erofs(image.meta, target, [device])
    try:
        yield target
    finally:
        mounts.umount(target, detach=True)


def start_reader(root: Path, seed: int = 0) -> subprocess.Popen[str]:
    """Reads every file of a directory in an order of its own; see `outcome`."""
    argv = [sys.executable, "-S", "-c", READ, str(root), str(seed)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def start_cat(file: Path) -> subprocess.Popen[bytes]:
    """Reads one file."""
    return subprocess.Popen(["/bin/cat", str(file)], stdout=subprocess.DEVNULL)


def outcome(reader: subprocess.Popen[str]) -> dict[str, str]:
    """Per file its digest, or `errno N`."""
    said, _ = reader.communicate(timeout=100)
    assert reader.returncode == 0
    return dict(line.split(" ", 1) for line in said.splitlines())
