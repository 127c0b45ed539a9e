"""What the benchmarks about environments run on: real content, made once and kept in `.cache/bench`.

A thing is made in a directory beside its own and moved into place when it is whole, so that a run
that was broken off leaves nothing that looks finished. Delete `.cache/bench` to have it made anew.
"""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import say
from dsec.images import debian
from dsec.images.disk import remove_tree
from dsec.kit.blocking import in_thread

CACHE = Path(__file__).parents[1] / ".cache/bench"
MIB = 1 << 20
_READ_BYTES = 1 << 20
_IMAGES = Path(debian.__file__).parent
_FORMATS = ("erofs/*.py", "oci/layer.py", "oci/tree.py", "pack.py", "records.py", "store/layout.py")


async def made(name: str, make: Callable[[Path], Awaitable[None]]) -> Path:
    """A directory of the cache; `make` fills it if it is not there yet."""
    place = CACHE / name
    if not place.exists():
        say(f"making {name} (once)")
        unfinished = place.with_name(f"{place.name}.unfinished")
        if unfinished.exists():
            remove_tree(unfinished)
        unfinished.mkdir(parents=True)
        await make(unfinished)
        unfinished.rename(place)
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A layer as registries keep it: a tar, compressed with gzip."""

    path: str
    digest: str
    """Of the compressed file."""
    diff_id: str
    """Of the tar."""
    size_bytes: int
    tar_bytes: int


def pack_tar(arguments: Sequence[str], target: Path) -> Packed:
    """Run `tar -c` with some arguments; compress what comes as Docker does. Blocking."""
    command = ["tar", "--numeric-owner", "-c", *arguments]
    inner, outer, length = hashlib.sha256(), hashlib.sha256(), 0
    with (
        target.open("wb") as out,
        subprocess.Popen(command, stdout=subprocess.PIPE) as tar,
        subprocess.Popen([gzip(), "-6", "-n"], stdin=subprocess.PIPE, stdout=out) as packer,
    ):
        assert tar.stdout is not None
        assert packer.stdin is not None
        while piece := tar.stdout.read(_READ_BYTES):
            inner.update(piece)
            length += len(piece)
            packer.stdin.write(piece)
        packer.stdin.close()
    if tar.returncode or packer.returncode:
        raise RuntimeError(f"{command!r} failed")
    with target.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            outer.update(piece)
    return Packed(
        path=target.name,
        digest=f"sha256:{outer.hexdigest()}",
        diff_id=f"sha256:{inner.hexdigest()}",
        size_bytes=target.stat().st_size,
        tar_bytes=length,
    )


def gzip() -> str:
    """What packs and unpacks gzip here: `pigz` as Docker takes it if it is there."""
    return "pigz" if shutil.which("pigz") else "gzip"


def save_packed(packed: Mapping[str, Packed], file: Path) -> None:
    """Write down what was packed, by name."""
    file.write_text(json.dumps({n: asdict(each) for n, each in packed.items()}, indent=1) + "\n")


def load_packed(file: Path) -> dict[str, Packed]:
    """Read what `save_packed` wrote."""
    return {name: Packed(**each) for name, each in json.loads(file.read_text()).items()}


def write_layout(layers: Sequence[tuple[Path, Packed]], place: Path) -> None:
    """An OCI image layout whose layers (bottom first) are links to files in the cache. Blocking."""
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)
    for file, packed in layers:
        (blobs / packed.digest.removeprefix("sha256:")).hardlink_to(file)
    config = {
        "architecture": "arm64" if os.uname().machine == "aarch64" else "amd64",
        "os": "linux",
        "config": {"Env": [f"PATH={debian.CONFIG.env['PATH']}"]},
        "rootfs": {"type": "layers", "diff_ids": [packed.diff_id for _, packed in layers]},
    }
    kind = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": _blob(config, blobs, f"{kind}.config.v1+json"),
        "layers": [
            _descriptor(f"{kind}.layer.v1.tar+gzip", packed.digest, packed.size_bytes)
            for _, packed in layers
        ],
    }
    index = {"schemaVersion": 2, "manifests": [_blob(manifest, blobs, manifest["mediaType"])]}
    (place / "index.json").write_text(json.dumps(index))
    (place / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def _blob(document: object, blobs: Path, kind: object) -> dict[str, object]:
    body = json.dumps(document).encode()
    digits = hashlib.sha256(body).hexdigest()
    (blobs / digits).write_bytes(body)
    return _descriptor(kind, f"sha256:{digits}", len(body))


def _descriptor(kind: object, digest: str, size: int) -> dict[str, object]:
    return {"mediaType": kind, "digest": digest, "size": size}


async def debian_tree(packages: Sequence[str], root: Path) -> None:
    """Build a Debian into a directory, as `dsec image build debian` does."""
    planned = debian.plan(None, packages)
    await debian.build(planned, root, lambda _step: None)
    await in_thread("disk", debian.tidy, root)


def unpack_wheels(names: Sequence[str], scratch: Path, where: Callable[[str], Path]) -> None:
    """Download wheels from PyPI with the host's own pip, unpack and compile each. Blocking.

    None of their code runs. Compiled as an installation leaves them, or every import would compile.

    Args:
        names: of packages that have a wheel for any platform or this one.
        scratch: for the download.
        where: the directory for a package.
    """
    wheels = scratch / "wheels"
    _pip(["download", "--no-deps", "--dest", str(wheels), *names])
    for file in wheels.iterdir():
        target = where(file.name.partition("-")[0].lower())
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(target)
        _compile(target)


def _compile(tree: Path) -> None:
    compileall.compile_dir(tree, stripdir=tree.parent, quiet=2)


def install(names: Sequence[str], target: Path) -> None:
    """Install packages from PyPI and all they depend on into a directory. Blocking."""
    options = ["--root-user-action=ignore", "--no-compile", "--target", str(target)]
    _pip(["install", *options, *names])
    _compile(target)


def download(names: Sequence[str], target: Path) -> None:
    """Download packages from PyPI and all they depend on, as wheels for Python 3.11. Blocking."""
    _pip(["download", "--dest", str(target), *names])


def _pip(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "-q", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
    subprocess.run([*command, *arguments[1:]], check=True)


def formats() -> str:
    """A digest over what decides how a layer lies in a node and in a store."""
    sources = [file for part in _FORMATS for file in sorted(_IMAGES.glob(part))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


async def filled(name: str, fill: Callable[[Path], Awaitable[None]]) -> Path:
    """As `made`, of what the product makes of a corpus: made anew when its formats change."""
    place = CACHE / name
    stamp = place / "formats"
    if place.exists() and not (stamp.exists() and stamp.read_text() == formats()):
        await in_thread("disk", remove_tree, place)

    async def fill_and_stamp(unfinished: Path) -> None:
        await fill(unfinished)
        (unfinished / "formats").write_text(formats())

    return await made(name, fill_and_stamp)


def disk_bytes(root: Path) -> int:
    """What a tree takes of the disk: allocated blocks, each inode once. Blocking.

    What is removed meanwhile does not count.
    """
    sizes: dict[tuple[int, int], int] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files, "."):
            with contextlib.suppress(FileNotFoundError):
                facts = os.lstat(os.path.join(directory, name))  # noqa: PTH118 - so many of them
                sizes[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())


def drop_cached(root: Path) -> None:
    """Have the kernel forget what it keeps of the files of a tree. Blocking."""
    for file in root.rglob("*"):
        if file.is_file() and not file.is_symlink():
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
