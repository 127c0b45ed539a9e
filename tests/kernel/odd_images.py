"""An image of three layers with all that is odd, the service under test, and how umoci unpacks it."""

from __future__ import annotations

import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import dsec
from dsec.images.records import ImageRecord
from dsec.images.service import ImageService, finish
from dsec.linux import mounts
from tests.kernel.trees import run
from tests.tars import Tar

ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(dsec.__path__[0]).parent)}
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
"""security.capability of a file with cap_net_raw=p."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory whose mounts and left-overs the test answers for."""
    yield tmp_path
    left = mounts.mounts_under(tmp_path)
    for mount in left:
        mounts.umount(Path(mount.target), detach=True)
    # Layers stay mounted when a service closes; nothing else may be.
    assert all("/run/layers/" in mount.target for mount in left)
    leftovers = list((tmp_path / "root/tmp").glob("*")) if (tmp_path / "root").exists() else []
    assert leftovers == []


@pytest.fixture
async def images(place: Path) -> AsyncIterator[ImageService]:
    async with ImageService(place / "root", place / "run") as service:
        yield service


# -- tars made by hand --------------------------------------------------------------------------


def first_layer() -> bytes:
    tar = Tar()
    tar.add("./", tarfile.DIRTYPE)
    tar.dirs("etc", "usr", "usr/bin", "usr/lib", "dev", "gone", "gone/deep", "opaque", "kinds")
    tar.add("tmp", tarfile.DIRTYPE, mode=0o1777, mtime=1_400_000_000)
    tar.add("private", tarfile.DIRTYPE, mode=0o750, uid=1234, gid=70000)
    tar.symlink("lib", "usr/lib").symlink("dangling", "/nowhere/at/all", mtime=1_300_000_000)
    tar.add("etc/passwd", content=b"root:x:0:0::/root:/bin/sh\n", mtime=1_234_567_890.25)
    tar.add("etc/removed", content=b"x").add("etc/empty")
    tar.add("etc/ancient", content=b"1970", mtime=0).add("etc/before", content=b"1960", mtime=-3e8)
    tar.add("usr/bin/su", content=b"#!" * 5000, mode=0o4755)
    tar.add("usr/bin/wall", content=b"tty", mode=0o2755, gid=5)
    tar.add("usr/bin/ping", content=b"ping", xattrs={"security.capability": CAPABILITY})
    tar.add("usr/lib/big", content=os.urandom(3_000_001))
    tar.add("noted", content=b"n", xattrs={"user.note": b"\x00\xff bin", "trusted.mine": b"1"})
    tar.add("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666)
    tar.add("dev/disk", tarfile.BLKTYPE, devmajor=259, devminor=300, mode=0o660, gid=6)
    tar.add("dev/pipe", tarfile.FIFOTYPE, mode=0o622)
    tar.add("one", content=b"linked").link("two", "one").link("etc/three", "./one")
    tar.link("etc/link-to-link", "dangling")
    tar.add("gone/file").add("gone/deep/file").add("opaque/old").dirs("opaque/olddir")
    tar.add("opaque/olddir/file").add("gone/deep/.hidden")
    tar.add(b"caf\xe9-\xff", content=b"latin").add("snow\u2603", content=b"utf8")
    tar.add("n" * 254, content=b"long").add(f"usr/lib/{'d' * 200}", tarfile.DIRTYPE)
    tar.add(f"usr/lib/{'d' * 200}/{'e' * 200}", content=b"longer")
    tar.add("kinds/file", content=b"f").dirs("kinds/dir", "kinds/dir/in").symlink(
        "kinds/sym", "dir"
    )
    tar.add("owned", uid=3_000_000_000, gid=65534, content=b"big id").add("new\nline", content=b"n")
    return tar.data()


def second_layer() -> bytes:
    tar = Tar()
    tar.dirs("etc").add(".wh.gone").add("etc/.wh.removed").add("etc/.wh.never-was")
    tar.add("opaque", tarfile.DIRTYPE, mode=0o700).add("opaque/.wh..wh..opq")
    tar.add("opaque/new", content=b"only me").dirs("opaque/olddir").add("opaque/olddir/fresh")
    tar.link("etc/passwd.bak", "etc/passwd")  # a file of the layer below
    tar.add("lib/through", content=b"lib is a link below")
    tar.add("tmp/unlisted-parent", content=b"tmp keeps its mode")
    tar.dirs("kinds").dirs("kinds/file").add("kinds/file/in", content=b"now a directory")
    tar.add("kinds/dir", content=b"now a file").dirs("kinds/sym").add("kinds/sym/in")
    tar.add("usr/bin/ping", content=b"ping", mode=0o700)
    tar.add("twice", content=b"first, and longer").add("twice", content=b"second")
    return tar.data()


def third_layer() -> bytes:
    """In GNU's format, self-contained."""
    tar = Tar(tarfile.GNU_FORMAT).dirs("etc", "opaque", "more", "more/dir")
    tar.add("etc/.wh.empty").add("opaque/.wh.new").add("more/dir/" + "g" * 150, content=b"gnu")
    tar.add(b"more/\xfe\xfe", content=b"bytes").add("more/alone", content=b"1" * 4096)
    return tar.data()


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OCI layout with tag `t`: three layers with everything a layer may hold."""
    place = tmp_path_factory.mktemp("oci")
    run("umoci", "init", "--layout", place / "layout")
    run("umoci", "new", "--image", f"{place}/layout:t")
    for number, data in enumerate([first_layer(), second_layer(), third_layer()]):
        tar = place / f"{number}.tar"
        tar.write_bytes(data)
        run("umoci", "raw", "add-layer", "--image", f"{place}/layout:t", tar)
    run(
        *("umoci", "config", "--image", f"{place}/layout:t", "--config.env", "A=b=c"),
        *("--config.workingdir", "/srv", "--config.user", "1000:7"),
        *("--config.entrypoint", "/init", "--config.cmd", "serve"),
    )
    run("umoci", "gc", "--layout", place / "layout")
    return place / "layout"


@pytest.fixture(scope="module")
def reference_tree(layout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("bundle") / "b"
    run("umoci", "unpack", "--image", f"{layout}:t", bundle)
    return bundle / "rootfs"


async def imported(images: ImageService, path: Path, name: str = "t") -> ImageRecord:
    await finish(images.import_path(path, name))
    return await images.resolve(name)
