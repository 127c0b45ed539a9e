"""Three images of real content as OCI layouts, made once with umoci and kept in `.cache/tests`.

What is kept is named after the recipe (this file), so that a changed recipe is made anew. Delete
`.cache/tests` to have newer packages in them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio

from dsec.images import debian
from dsec.linux import mounts
from dsec.rollout.sources import fetch_all
from dsec.rollout.tasks import Pin
from tests.kernel.trees import run

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / ".cache/tests"
TAG = "t"
Step = Callable[[Path], None]

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
"""security.capability of a file with cap_net_raw=p."""
ACL = bytes.fromhex(
    "02000000"  # version 2; then entries of tag, permissions and id
    "01000600ffffffff"  # the owner: rw-
    "02000400e8030000"  # user 1000: r--
    "04000400ffffffff"  # the group: r--
    "10000400ffffffff"  # at most: r--
    "20000000ffffffff"  # all others: nothing
)
"""system.posix_acl_access of a file that user 1000 may read too."""


def layout(name: str) -> Path:
    """An image's OCI layout, its tag `TAG`: `minimal`, `changed` or `many`."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return _made(f"{name}-{recipe}", _RECIPES[name])


def _made(name: str, make: Step) -> Path:
    """A directory or file of the cache; what was broken off never looks finished."""
    place = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            for old in CACHE.glob(f"{name.rpartition('-')[0]}-*"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="unfinished-") as scratch:
                make(Path(scratch) / "whole")
                (Path(scratch) / "whole").rename(place)
    return place


# -- one layer: Debian's minimal system ----------------------------------------------------------


def _minimal(place: Path) -> None:
    _new(place)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="unfinished-") as scratch:
        tar = _debian_tar(Path(scratch), ("ca-certificates",))
        run("umoci", "raw", "add-layer", "--image", f"{place}:{TAG}", tar)


def _new(place: Path) -> None:
    run("umoci", "init", "--layout", place)
    run("umoci", "new", "--image", f"{place}:{TAG}")


def _debian_tar(scratch: Path, packages: tuple[str, ...]) -> Path:
    """A Debian root as a tar, with times to the nanosecond, owners, links, devices and xattrs."""
    ours = debian.plan(None, [])
    planned = debian.Plan(ours.suite, ours.is_own_suite, ours.sources, packages)
    root, tar = scratch / "root", scratch / "root.tar"
    environment = {**os.environ, "TMPDIR": str(scratch)}
    subprocess.run(
        planned.command(root),
        input=planned.stdin(),
        env=environment,
        check=True,
        capture_output=True,
    )
    debian.tidy(root)
    form = ["--format=posix", "--pax-option=delete=atime,delete=ctime", "--numeric-owner"]
    run("tar", *form, "--xattrs", "--xattrs-include=*", "--sort=name", "-cf", tar, "-C", root, ".")
    return tar


# -- several layers of changes -------------------------------------------------------------------


def _changed(place: Path) -> None:
    """Debian with Python and a compiler, changed by umoci's own repacking again and again."""
    _new(place)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="unfinished-") as scratch:
        wanted = ("ca-certificates", "python3", "gcc", "libc6-dev")
        tar = _debian_tar(Path(scratch), wanted)
        run("umoci", "raw", "add-layer", "--image", f"{place}:{TAG}", tar)
        steps = [_install, _replace_kinds, _odd_things, _back_again, _remove_package, _touch_all]
        _repack(place, Path(scratch) / "bundle", steps)
        hidden = Path(scratch) / "opaque.tar"
        hidden.write_bytes(_opaque_layer(Path(scratch)))
        run("umoci", "raw", "add-layer", "--image", f"{place}:{TAG}", hidden)
    run("umoci", "gc", "--layout", place)


def _repack(place: Path, bundle: Path, steps: Iterable[Step]) -> None:
    """Unpack an image, and add what each step changes as a layer."""
    run("umoci", "unpack", "--image", f"{place}:{TAG}", bundle)
    for step in steps:
        step(bundle / "rootfs")
        run("umoci", "repack", "--refresh-bundle", "--image", f"{place}:{TAG}", bundle)


def _install(root: Path) -> None:
    """Packages put in by dpkg: its databases rewritten, files and links added."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = ["less", "file", "libmagic1", "libmagic-mgc", "tree", "iputils-ping"]
        wanted += ["libcap2-bin"]
        # apt fetches as a user of its own, who must be able to write there.
        Path(scratch).chmod(0o777)
        run("apt-get", "download", "-qq", *wanted, cwd=Path(scratch))
        packages = sorted(str(path) for path in Path(scratch).glob("*.deb"))
        _dpkg(root, "--install", *packages)


def _dpkg(root: Path, *arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("dpkg", "--root", str(root), "--force-unsafe-io", *arguments, env=environment)
    # Maintainer scripts may have asked for it in the root.
    assert mounts.mounts_under(root) == []


def _replace_kinds(root: Path) -> None:
    """Directories become files and links, files become directories, trees are moved."""
    shutil.rmtree(root / "usr/share/doc")
    (root / "usr/share/doc").write_text("no documentation here\n")
    (root / "usr/share/zoneinfo").rename(root / "opt/zones")
    (root / "usr/share/zoneinfo").symlink_to("/opt/zones")
    shutil.copytree(root / "usr/share/perl5", root / "opt/perl", symlinks=True)
    (root / "etc/motd").unlink(missing_ok=True)
    (root / "etc/motd").mkdir()
    (root / "etc/motd/part").write_text("hello\n")
    header = root / "usr/include/stdio.h"
    header.unlink()
    header.symlink_to("stdlib.h")
    shutil.rmtree(root / "usr/lib/python3/dist-packages", ignore_errors=True)
    shutil.rmtree(root / "usr/share/gcc")


def _odd_things(root: Path) -> None:
    """Hard links across layers, attributes, devices, names that few expect."""
    odd = root / "odd"
    odd.mkdir(mode=0o1777)
    (odd / "python").hardlink_to((root / "usr/bin/python3").resolve(strict=False).absolute())
    (odd / "bash").hardlink_to(root / "bin/bash")
    (root / "usr/bin/another-bash").hardlink_to(root / "bin/bash")
    _attributes(odd)
    _devices(odd)
    names = ["new\nline", "tab\there", " leading", "trailing ", "-rf", "*", "n" * 255, "☃" * 85]
    for name in [*names, os.fsdecode(b"caf\xe9-\xff"), "back\\slash", 'quo"te', "a=b", "%41"]:
        (odd / name).write_text(f"I am {name!r}")
    deep = odd.joinpath(*["d" * 200] * 12)
    deep.mkdir(parents=True)
    (deep / "end").write_text("far away")
    (odd / "sparse").touch()
    os.truncate(odd / "sparse", 64 << 20)
    os.utime(odd / "tab\there", (0, 1))
    (odd / "long-link").symlink_to("/" + "/".join(["x" * 99] * 40))


def _attributes(odd: Path) -> None:
    for name in ("capable", "listed", "noted", "setuid"):
        (odd / name).write_text(f"{name}\n")
    os.setxattr(odd / "capable", "security.capability", CAPABILITY)
    os.setxattr(odd / "listed", "system.posix_acl_access", ACL)
    os.setxattr(odd / "noted", "user.note", b"\x00\xff bin\n")
    os.setxattr(odd / "noted", "user.empty", b"")
    os.setxattr(odd / "noted", "trusted.mine", b"t" * 3000)
    (odd / "inherits").mkdir()
    os.setxattr(odd / "inherits", "system.posix_acl_default", ACL)
    os.setxattr(odd / "inherits", "user.of-a-directory", b"yes")
    os.chown(odd / "setuid", 3_000_000_000, 70_000)
    (odd / "setuid").chmod(0o6755)


def _devices(odd: Path) -> None:
    os.mknod(odd / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(odd / "disk", stat.S_IFBLK | 0o660, os.makedev(259, 300_000))
    os.chown(odd / "disk", 0, 6)
    os.mkfifo(odd / "fifo", 0o622)
    (odd / "fifo-too").hardlink_to(odd / "fifo")


def _back_again(root: Path) -> None:
    """What was replaced comes back as what it was; what was linked is linked no more."""
    (root / "usr/share/doc").unlink()
    (root / "usr/share/doc/new").mkdir(parents=True)
    (root / "usr/share/doc/new/copyright").write_text("mine\n")
    (root / "usr/share/zoneinfo").unlink()
    (root / "opt/zones").rename(root / "usr/share/zoneinfo")
    shutil.rmtree(root / "etc/motd")
    (root / "etc/motd").write_text("a file again\n")
    (root / "usr/include/stdio.h").unlink()
    (root / "usr/include/stdio.h").write_text("#error replaced\n")
    (root / "odd/bash").unlink()
    (root / "odd/fifo-too").unlink()
    (root / "odd/fifo-too").mkdir()
    os.removexattr(root / "odd/noted", "user.note")


def _remove_package(root: Path) -> None:
    _dpkg(root, "--purge", "tree", "less")
    run("chroot", root, "python3", "-m", "compileall", "-q", "/usr/lib/python3.11/json")


def _touch_all(root: Path) -> None:
    """Owners, modes and times alone."""
    for path in sorted((root / "usr/share/perl").rglob("*")):
        os.chown(path, 1000, 1000, follow_symlinks=False)
    for path in sorted((root / "usr/lib/python3.11").glob("*.py"))[:30]:
        if not path.is_symlink():
            path.chmod(0o750)
    os.utime(root / "etc/passwd", (1_234_567_890, 1_234_567_890))
    (root / "usr/share/zoneinfo").chmod(0o700)


def _opaque_layer(scratch: Path) -> bytes:
    """What umoci never writes itself: a directory emptied by the opaque mark."""
    path = scratch / "raw.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (
            ("usr", tarfile.DIRTYPE),
            ("usr/share", tarfile.DIRTYPE),
            ("usr/share/perl5", tarfile.DIRTYPE),
            ("usr/share/perl5/.wh..wh..opq", tarfile.REGTYPE),
            ("usr/share/perl5/only", tarfile.REGTYPE),
            ("opt/.wh.perl", tarfile.REGTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.mtime = kind, 1_600_000_000.125
            member.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
            tar.addfile(member)
    return path.read_bytes()


# -- many layers ---------------------------------------------------------------------------------


def _many(place: Path) -> None:
    """Source distributions, one a layer, then what people do with them afterwards."""
    _new(place)
    found = anyio.run(fetch_all, _pins(), CACHE / "sdists")
    steps: list[Step] = [_unpacked(name, data) for name, data in sorted(found.items())]
    steps += [_drop_tests, _move_in, _compile, _link_alike, _readmes_to_directories]
    steps += [steps[0], _new_owner, steps[1], _drop_readmes]
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="unfinished-") as scratch:
        _repack(place, Path(scratch) / "bundle", steps)
    run("umoci", "gc", "--layout", place)


def _pins() -> list[Pin]:
    pins = []
    for file in sorted((REPOSITORY / "examples/tasks").glob("*/task.toml")):
        source = tomllib.loads(file.read_text())["source"]
        keys = ("package", "version", "sha256")
        pins.append(Pin(**{key: source[key] for key in keys}))
    return pins


def _unpacked(name: str, data: bytes) -> Step:
    def step(root: Path) -> None:
        (root / "src").mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile() as archive:
            Path(archive.name).write_bytes(data)
            run("tar", "--recursive-unlink", "-xf", archive.name, "-C", root / "src")

    return step


def _drop_tests(root: Path) -> None:
    for path in sorted((root / "src").glob("*/tests")):
        shutil.rmtree(path)


def _move_in(root: Path) -> None:
    (root / "lib").mkdir()
    for path in sorted((root / "src").glob("*/src/*")):
        path.rename(root / "lib" / path.name)


def _compile(root: Path) -> None:
    run(sys.executable, "-m", "compileall", "-q", root / "lib")


def _link_alike(root: Path) -> None:
    """Every licence of the same text becomes one file."""
    seen: dict[bytes, Path] = {}
    for path in sorted((root / "src").rglob("*")):
        if path.is_file() and not path.is_symlink():
            first = seen.setdefault(path.read_bytes(), path)
            if first != path:
                path.unlink()
                path.hardlink_to(first)


def _readmes_to_directories(root: Path) -> None:
    for path in sorted((root / "src").glob("*/README*")):
        text = path.read_bytes()
        path.unlink()
        path.mkdir()
        (path / "text").write_bytes(text)


def _drop_readmes(root: Path) -> None:
    for path in sorted((root / "src").glob("*/README*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _new_owner(root: Path) -> None:
    for path in sorted((root / "lib").rglob("*")):
        os.chown(path, 1000, 1000, follow_symlinks=False)


_RECIPES: dict[str, Step] = {"minimal": _minimal, "changed": _changed, "many": _many}
