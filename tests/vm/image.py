"""The guest's root: this repository, its Python and a few programs of this host, as one EROFS image.

Everything has the path it has here, so that a virtual environment works there too. Large directories
are not copied: they are bound into a tree that exists only in the builder's own mount namespace.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.vm.kernel import REPOSITORY

INIT = Path(__file__).with_name("init")
BUILT = REPOSITORY / "native/target/x86_64-unknown-linux-gnu/release"
PYTHON = Path(sys.executable).resolve()
LIBRARY = Path(sysconfig.get_path("stdlib"))
ENVIRONMENT = Path(sys.prefix)
BOUND = (LIBRARY, ENVIRONMENT)
"""Too large to be copied."""
PROGRAMS = ("bash", "mke2fs", "mkfs.ext4", "e2fsck", "resize2fs", "mkfs.erofs", "unshare")
"""What tests and the edge start; the rest is busybox."""
EMPTY = ("dev", "proc", "sys", "tmp", "run", "root", "var/tmp")
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
UNUSED_STDLIB = "site-packages|dist-packages|test|idlelib|lib2to3|tkinter|ensurepip|config-[^/]*"
UNUSED_PACKAGES = (
    "pyarrow|mypy|mypyc|[^/]*__mypyc[^/]*|pip|setuptools|hypothesis|grimp|importlinter"
)
"""Not needed for running tests; leaving them out halves the image."""


def build(target: Path, run: str) -> None:
    """Make the image.

    Args:
        target: the file to write.
        run: shell lines that the guest executes once it is up; it powers off after them.

    Raises:
        CalledProcessError: it failed; what was said is in the output.
    """
    builder = [sys.executable, "-m", "tests.vm.image", str(target)]
    with tempfile.TemporaryDirectory(prefix="dsec-guest-tree-") as tree:
        subprocess.run(
            ["unshare", "--mount", "--propagation", "private", *builder, tree],
            input=run,
            text=True,
            check=True,
            cwd=REPOSITORY,
        )


def _build_here(target: Path, tree: Path, run: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "guest", tree], check=True)
    _lay_out(tree)
    _add_busybox(tree)
    _add_programs(tree)
    _add_python(tree)
    _add_repository(tree)
    (tree / "guest").mkdir()
    shutil.copy2(INIT, tree / "guest/init")
    (tree / "guest/run").write_text(run)
    argv = [
        "mkfs.erofs",
        "--quiet",
        "-x-1",
        "-Eforce-inode-extended",
        f"--exclude-regex={_unused()}",
    ]
    subprocess.run([*argv, target, tree], check=True)


def _lay_out(tree: Path) -> None:
    for name in EMPTY:
        (tree / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    (tree / "etc").mkdir()
    for name, text in ACCOUNTS.items():
        (tree / name).write_text(text)


def _add_busybox(tree: Path) -> None:
    found = shutil.which("busybox")
    assert found, "busybox (Debian: busybox-static)"
    shutil.copy2(found, tree / "usr/bin/busybox")
    listed = subprocess.run([found, "--list"], check=True, stdout=subprocess.PIPE, text=True)
    for name in {*listed.stdout.split()} - {"busybox"}:
        (tree / "usr/bin" / name).symlink_to("busybox")


def _add_programs(tree: Path) -> None:
    found = [path for name in PROGRAMS if (path := shutil.which(name))]
    for path in found:
        _copy(Path(path), tree)
    _add_libraries(found, tree)


def _copy(path: Path, tree: Path) -> None:
    """A file at the same path; through a link of a directory, at the place that is meant."""
    place = tree / str(path.parent.resolve())[1:] / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():  # to busybox, of the same name
        place.unlink()
    shutil.copy2(path, place)


def _add_libraries(programs: Iterable[str | Path], tree: Path) -> None:
    listed = subprocess.run(["ldd", *programs], check=False, capture_output=True, text=True).stdout
    for path in {Path(found) for found in re.findall(r"(/\S+) \(0x", listed)}:
        if not any(directory in path.parents for directory in BOUND):
            _copy(path, tree)


def _add_python(tree: Path) -> None:
    _copy(PYTHON, tree)
    for link in _links(ENVIRONMENT / "bin/python"):
        if ENVIRONMENT not in link.parents:
            _copy(link, tree)
    extensions = [*LIBRARY.glob("lib-dynload/*.so"), *ENVIRONMENT.rglob("*.so")]
    _add_libraries([PYTHON, *extensions], tree)
    for directory in BOUND:
        _bind(directory, tree)


def _links(path: Path) -> Iterator[Path]:
    while path.is_symlink():
        yield path
        path = path.parent / path.readlink()
    yield path


def _bind(directory: Path, tree: Path) -> None:
    place = tree / str(directory)[1:]
    place.mkdir(parents=True, exist_ok=True)
    # Read-only: what is done to the tree must never be done to the directory itself.
    subprocess.run(["mount", "--bind", "-o", "ro", directory, place], check=True)


def _add_repository(tree: Path) -> None:
    place = tree / str(REPOSITORY)[1:]
    for name in ("src", "tests", "bench", "spec"):
        shutil.copytree(REPOSITORY / name, place / name)
    for name in ("pyproject.toml", "native/Cargo.toml"):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copy2(REPOSITORY / name, place / name)
    for program in ("aether", "probe"):
        _copy(BUILT / program, tree)
    # The guest's processor is slow: what is compiled here need not be compiled there. What does not
    # compile is for the tests to say.
    argv = [
        sys.executable,
        "-m",
        "compileall",
        "-q",
        "-s",
        str(tree),
        "-p",
        "/",
        str(place / "src"),
    ]
    subprocess.run(argv, check=False)


def _unused() -> str:
    """What the image is not to hold, as mkfs.erofs wants it."""
    library = re.escape(str(LIBRARY)[1:])
    environment = re.escape(str(ENVIRONMENT)[1:])
    packages = rf"{environment}/lib/python[^/]*/site-packages"
    return rf"^({library}/({UNUSED_STDLIB})|{packages}/({UNUSED_PACKAGES}))$"


if __name__ == "__main__":
    os.umask(0o022)
    _build_here(Path(sys.argv[1]), Path(sys.argv[2]), sys.stdin.read())
