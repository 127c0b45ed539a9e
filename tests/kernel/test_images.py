"""Images against the real thing: umoci's unpacking, a real registry, real mounts.

Needs root, and umoci, skopeo, docker-registry and zstd of Debian.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import dsec
from dsec.base.errors import (
    Conflict,
    DsecError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StorageFull,
    Unavailable,
    Unsupported,
)
from dsec.images.importer import file_digest
from dsec.images.oci.layer import Limits
from dsec.images.records import ImageRecord
from dsec.images.service import ImageService, finish
from dsec.linux import mounts
from dsec.wire.public_v1 import ImageProgress, PullImage
from tests.kernel.trees import assert_same, mounted, overlaid, run
from tests.tars import Tar

pytestmark = [pytest.mark.anyio, pytest.mark.needs_root]

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


# -- against umoci -----------------------------------------------------------------------------


async def imported(images: ImageService, path: Path, name: str = "t") -> ImageRecord:
    await finish(images.import_path(path, name))
    return await images.resolve(name)


async def test_an_image_has_what_umoci_unpacks(
    images: ImageService, layout: Path, reference_tree: Path, place: Path
) -> None:
    record = await imported(images, layout)
    assert len(record.layers) == 3
    assert (record.config.env["A"], record.config.workdir) == ("b=c", "/srv")
    assert (record.config.user, record.config.entrypoint) == ("1000:7", ["/init"])
    assert record.config.cmd == ["serve"]
    seen = await overlaid(images, record, place / "seen")
    try:
        assert_same(seen, reference_tree)
    finally:
        mounts.umount(place / "seen")


async def test_every_way_in_gives_the_same_layers(
    images: ImageService, layout: Path, place: Path
) -> None:
    first = await imported(images, layout)
    archives = {
        "oci.tar": f"oci-archive:{place}/oci.tar:t",
        "docker.tar": f"docker-archive:{place}/docker.tar:team/t:1",
        "zstd": f"oci:{place}/zstd:t",
    }
    for name, destination in archives.items():
        zstd = ["--dest-compress-format", "zstd", "--dest-compress"] if name == "zstd" else []
        run("skopeo", "copy", "-q", *zstd, f"oci:{layout}:t", destination)
        other = await imported(images, place / name, f"other/{name}")
        assert (other.layers, other.config) == (first.layers, first.config)
    for packed in ("gzip", "zstd", "xz", "bzip2"):
        run(packed, "-k", place / "oci.tar")
    for suffix in ("gz", "zst", "xz", "bz2"):
        other = await imported(images, place / f"oci.tar.{suffix}", f"packed/{suffix}")
        assert other.layers == first.layers
    assert len(images.layers.records()) == 4  # and what they are merged into


async def test_layers_are_made_from_zstd_too(
    images: ImageService, layout: Path, reference_tree: Path, place: Path
) -> None:
    run(
        *("skopeo", "copy", "-q", "--dest-compress", "--dest-compress-format", "zstd"),
        *(f"oci:{layout}:t", f"oci:{place}/zstd:t"),
    )
    record = await imported(images, place / "zstd")
    seen = await overlaid(images, record, place / "seen")
    try:
        assert_same(seen, reference_tree)
    finally:
        mounts.umount(place / "seen")


async def test_a_layer_that_leans_on_those_below_is_theirs_alone(
    images: ImageService, layout: Path
) -> None:
    record = await imported(images, layout)
    bottom, middle, top = [images.layers.get(digest) for digest in record.layers]
    assert (bottom.digest, bottom.below) == (bottom.diff_id, [])
    assert (top.digest, top.below) == (top.diff_id, [])
    assert middle.digest != middle.diff_id
    assert middle.below == [bottom.digest]


# -- root file systems -------------------------------------------------------------------------


def packed(data: bytes, packer: str) -> bytes:
    if not packer:
        return data
    return subprocess.run([packer, "-c"], input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize("packer", ["", "gzip", "zstd", "xz", "bzip2"])
async def test_a_root_file_system_streams_in(
    images: ImageService, place: Path, packer: str
) -> None:
    data = packed(first_layer(), packer)

    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 65536):
            yield data[start : start + 65536]

    image = await finish(images.import_archive("root:fs", stream()))
    (layer,) = await mounted(images, await images.resolve("root:fs"), "sbx1")
    assert image.layers == [images.layers.records()[0].digest]
    assert (layer / "etc/passwd").read_text().startswith("root:")
    assert (layer / "usr/bin/su").stat().st_mode == 0o104755


async def test_a_directory_comes_in(images: ImageService, place: Path) -> None:
    tree = place / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/sh").write_text("#!")
    os.link(tree / "bin/sh", tree / "bin/ash")
    os.utime(tree / "bin/sh", (1, 1_000_000_001))
    record = await imported(images, tree)
    (layer,) = await mounted(images, record, "sbx1")
    status = (layer / "bin/sh").stat()
    assert (status.st_nlink, int(status.st_mtime)) == (2, 1_000_000_001)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [100, 512 * 3, 512 * 3 + 10, 200_000, -10_240, -512])
async def test_cut_short(images: ImageService, place: Path, cut: int) -> None:
    data = first_layer().rstrip(b"\0")
    data += bytes(-len(data) % 512) + bytes(1024)
    (place / "t.tar").write_bytes(data[:cut] if cut != -512 else data[:-1024])
    with pytest.raises(InvalidRequest):
        await finish(images.import_path(place / "t.tar", "cut"))
    assert images.layers.records() == []


async def test_cut_short_blob(images: ImageService, layout: Path, place: Path) -> None:
    run("cp", "-a", layout, place / "bad")
    blob = max((place / "bad/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = blob.read_bytes()
    blob.write_bytes(data[:-7])
    with pytest.raises(InvalidRequest, match="cut short"):
        await imported(images, place / "bad")
    blob.write_bytes(data[:-7] + bytes(7))
    with pytest.raises(InvalidRequest, match="hashes to"):
        await imported(images, place / "bad")


HOSTILE: dict[str, Callable[[Tar, str], Tar]] = {
    "dotdot": lambda tar, out: tar.add("../../../../../../.." + out, content=b"evil"),
    "absolute": lambda tar, out: tar.add(out, content=b"evil"),
    "symlink": lambda tar, out: tar.symlink("s", str(Path(out).parent)).add(
        f"s/{Path(out).name}", content=b"evil"
    ),
    "symlink up": lambda tar, out: tar.symlink("s", "../../../../../../..").add(
        "s" + out, content=b"evil"
    ),
    "write through": lambda tar, out: tar.symlink("s", out).add("s", content=b"evil"),
    "hard link": lambda tar, out: tar.link("h", out).add("h", content=b"evil"),
    "hard link up": lambda tar, out: tar.link("h", "../../../../../../.." + out),
    "link by symlink": lambda tar, out: (
        tar.symlink("s", "/").link("h", "s" + out).add("h", content=b"evil")
    ),
    "symlink swap": lambda tar, out: (
        tar.dirs("d")
        .add("d/x")
        .symlink("d", str(Path(out).parent))
        .add(f"d/{Path(out).name}", content=b"evil")
    ),
    "whiteout": lambda tar, out: tar.symlink("s", str(Path(out).parent)).add(
        f"s/.wh.{Path(out).name}"
    ),
}


@pytest.mark.adversarial
@pytest.mark.parametrize("trick", HOSTILE)
async def test_nothing_is_written_outside(images: ImageService, place: Path, trick: str) -> None:
    victim = place / "victim"
    victim.write_bytes(b"good")
    before = (victim.stat().st_ino, victim.stat().st_mtime_ns, victim.stat().st_nlink)
    (place / "t.tar").write_bytes(HOSTILE[trick](Tar(), str(victim)).data())
    try:
        await finish(images.import_path(place / "t.tar", "evil"))
    except InvalidRequest:
        assert images.layers.records() == []
    assert victim.read_bytes() == b"good"
    assert (victim.stat().st_ino, victim.stat().st_mtime_ns, victim.stat().st_nlink) == before


@pytest.mark.adversarial
async def test_a_device_planted_first_is_not_written_to(images: ImageService, place: Path) -> None:
    tar = Tar().add("d", tarfile.CHRTYPE, devmajor=1, devminor=5).add("d", content=b"evil")
    (place / "t.tar").write_bytes(tar.data())
    record = await imported(images, place / "t.tar")
    (layer,) = await mounted(images, record, "sbx1")
    assert (layer / "d").read_bytes() == b"evil"


@pytest.mark.adversarial
async def test_overlay_marks_of_the_tar_are_dropped(images: ImageService, place: Path) -> None:
    tar = Tar().add("d", tarfile.DIRTYPE, xattrs={"trusted.overlay.redirect": b"/etc"})
    (place / "t.tar").write_bytes(tar.data())
    (layer,) = await mounted(images, await imported(images, place / "t.tar"), "sbx1")
    assert os.listxattr(layer / "d") == []


async def test_the_longest_name_there_can_be(images: ImageService, place: Path) -> None:
    (place / "t.tar").write_bytes(Tar().add("n" * 255).data())
    (layer,) = await mounted(images, await imported(images, place / "t.tar"), "sbx1")
    assert (layer / ("n" * 255)).is_file()


async def test_limits(place: Path) -> None:
    (place / "t.tar").write_bytes(first_layer())
    for limits in (Limits(10, 1 << 30), Limits(1000, 1 << 20)):
        async with ImageService(place / "root", place / "run", limits=limits) as images:
            with pytest.raises(PayloadTooLarge):
                await finish(images.import_path(place / "t.tar", "large"))


@pytest.mark.adversarial
async def test_a_bomb_of_zeros_stops_at_the_limit(place: Path) -> None:
    info = tarfile.TarInfo("bomb")
    info.size = 8 << 40
    head = info.tobuf(tarfile.GNU_FORMAT)
    (place / "t.tar").write_bytes(head)
    async with ImageService(place / "root", place / "run") as images:
        with pytest.raises((PayloadTooLarge, InvalidRequest)):
            await finish(images.import_path(place / "t.tar", "bomb"))


async def test_a_full_disk_leaves_nothing(place: Path) -> None:
    (place / "t.tar").write_bytes(first_layer())
    for size in ("1m", "2m"):
        (place / "small").mkdir(exist_ok=True)
        mounts.mount("tmpfs", place / "small", "tmpfs", mounts.MountFlag(0), f"size={size}")
        try:
            async with ImageService(place / "small", place / "run") as images:
                with pytest.raises(StorageFull):
                    await finish(images.import_path(place / "t.tar", "full"))
                assert await images.list_images() == []
                assert images.layers.records() == []
                assert list((place / "small/tmp").iterdir()) == []
        finally:
            mounts.umount(place / "small")


# -- the store ---------------------------------------------------------------------------------


async def test_a_layer_is_mounted_once_and_adopted(place: Path, layout: Path) -> None:
    async with ImageService(place / "root", place / "run") as images:
        record = await imported(images, layout)
        first = await mounted(images, record, "sbx1")
        assert await mounted(images, record, "sbx2") == first
    async with ImageService(place / "root", place / "run") as images:
        images.environments.rebuild_pins([("sbx1", record.mounts)])
        assert await mounted(images, await images.resolve("t"), "sbx3") == first
        assert len(mounts.mounts_under(place / "run")) == 1
        with pytest.raises(Conflict):
            await images.remove("t")
        for sandbox in ("sbx1", "sbx3"):
            assert await images.environments.unmount_unused() == []
            await images.environments.release(sandbox)
        assert sorted(await images.environments.unmount_unused()) == sorted(record.mounts)
        assert mounts.mounts_under(place / "run") == []
        await images.remove("t")
        assert images.layers.records() == []
        with pytest.raises(NotFound):
            await images.resolve("t")


async def test_a_layer_somebody_unmounted_is_mounted_again(
    images: ImageService, place: Path, layout: Path
) -> None:
    record = await imported(images, layout)
    wanted = await mounted(images, record, "sbx1")
    for path in wanted:
        mounts.umount(path)
        path.rmdir()
    (place / "run/layers").rmdir()
    assert await mounted(images, record, "sbx2") == wanted
    assert len(mounts.mounts_under(place / "run")) == len(record.mounts)


async def test_a_file_system_that_cannot_carry_images_is_named(place: Path) -> None:
    (place / "t.tar").write_bytes(Tar().dirs("old").data())
    (place / "small").mkdir()
    mounts.mount("tmpfs", place / "small", "tmpfs", mounts.MountFlag(0), "size=5m")
    try:
        async with ImageService(place / "small", place / "run") as images:
            record = await imported(images, place / "t.tar")
            with pytest.raises(Unsupported, match=r"small.* cannot carry images; keep the state"):
                await mounted(images, record, "sbx1")
    finally:
        mounts.umount(place / "small")


async def test_layers_nobody_needs_go_with_the_next_import(
    images: ImageService, place: Path, layout: Path
) -> None:
    """Those of an image that was replaced, unless a sandbox has them, and of a failed import."""
    (place / "t.tar").write_bytes(Tar().dirs("old").data())
    (place / "u.tar").write_bytes(Tar().dirs("older").data())
    used = await imported(images, place / "u.tar")
    await mounted(images, used, "sbx1")
    dropped = await imported(images, place / "t.tar")
    kept = await imported(images, layout)
    assert set(images.layers.digests()) == {*used.layers, *kept.layers, *kept.mounts}
    assert not images.layers.has(dropped.layers[0])


async def test_an_upload_outlives_its_uploader_if_others_wait_for_it(
    images: ImageService, place: Path
) -> None:
    data = first_layer()

    async def archive() -> AsyncIterator[bytes]:
        yield data

    first = images.import_archive("t", archive())
    async for event in first:
        if event.step != "receiving":  # type: ignore[union-attr]
            break
    second = images.import_archive("t", archive())
    joined = [await anext(second), await anext(second)]
    assert joined[-1].step != "receiving"  # type: ignore[union-attr]
    await first.aclose()  # type: ignore[attr-defined]
    assert (await finish(second)).name == "t:latest"


async def test_layers_shared_by_images_outlive_one(images: ImageService, layout: Path) -> None:
    await imported(images, layout, "one")
    record = await imported(images, layout, "two")
    await mounted(images, record, "sbx1")
    await images.remove("one")  # the sandbox's layers are kept by the other name
    with pytest.raises(Conflict):
        await images.remove("two")
    assert len(images.layers.records()) == 4  # and what they are merged into


async def test_two_who_want_the_same_share_the_work(images: ImageService, layout: Path) -> None:
    seen: list[list[Any]] = [[], []]

    async def watch(into: list[Any]) -> None:
        into.extend([event async for event in images.import_path(layout, "t")])

    async with anyio.create_task_group() as tasks:
        for into in seen:
            tasks.start_soon(watch, into)
    assert seen[0][-1] == seen[1][-1]
    assert any(isinstance(event, ImageProgress) for event in seen[1])


async def test_different_images_at_once_convert_a_shared_layer_once(
    images: ImageService, layout: Path
) -> None:
    async with anyio.create_task_group() as tasks:
        for name in ("one", "two", "three"):
            tasks.start_soon(imported, images, layout, name)
    assert len(images.layers.records()) == 4  # and what they are merged into
    assert len(await images.list_images()) == 3


async def test_who_leaves_cancels(images: ImageService, place: Path) -> None:
    (place / "t.tar").write_bytes(first_layer())
    events = images.import_path(place / "t.tar", "t")
    async for _ in events:
        break
    await events.aclose()  # type: ignore[attr-defined]
    with anyio.fail_after(20):
        while list((place / "root/tmp").iterdir()):  # noqa: ASYNC110 - the file system tells nobody
            await anyio.sleep(0.01)
    assert await images.list_images() == []


async def test_what_a_crash_left_is_swept(place: Path) -> None:
    rubbish = place / "root/tmp/import-1/new"
    rubbish.mkdir(parents=True)
    (rubbish / "file").write_text("half")
    async with ImageService(place / "root", place / "run"):
        assert not rubbish.exists()


_KILLED = """
import sys, anyio
from pathlib import Path
from dsec.images.service import ImageService

async def main(root, run, path):
    async with ImageService(Path(root), Path(run)) as images:
        async for event in images.import_path(Path(path), "t"):
            print(event, flush=True)

anyio.run(main, *sys.argv[1:])
"""


def kill_at(steps: int, place: Path, layout: Path) -> None:
    argv = [sys.executable, "-c", _KILLED, str(place / "root"), str(place / "run"), str(layout)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=ENVIRONMENT) as child:
        assert child.stdout is not None
        for _ in range(steps):
            child.stdout.readline()
        child.kill()


async def test_killed_in_the_middle(place: Path, layout: Path, reference_tree: Path) -> None:
    """At whatever step the edge is killed, the next one finds whole layers or none."""
    for steps in range(1, 10):
        kill_at(steps, place, layout)
        async with ImageService(place / "root", place / "run") as images:
            for layer in images.layers.records():
                assert file_digest(images.layers.meta(layer.digest)) == layer.meta.digest
                for device in layer.devices:
                    raw = images.data.raw(device)
                    assert raw is not None
                    assert file_digest(raw) == device
            assert len(await images.list_images()) in (0, 1)
    async with ImageService(place / "root", place / "run") as images:
        record = await imported(images, layout)
        seen = await overlaid(images, record, place / "seen")
        try:
            assert_same(seen, reference_tree)
        finally:
            mounts.umount(place / "seen")
    assert sorted(path.name for path in (place / "root").iterdir()) == [
        *("data", "images", "layers", "lock", "named", "tmp", "traces")
    ]


async def test_errors_come_out_as_they_are(place: Path) -> None:
    with pytest.raises(NotFound):
        async with ImageService(place / "root", place / "run") as images:
            await images.resolve("nonesuch")


async def test_one_store_has_one_owner(images: ImageService, place: Path) -> None:
    with pytest.raises(Conflict):
        async with ImageService(place / "root", place / "run"):
            pass


# -- a registry --------------------------------------------------------------------------------

_REGISTRY = """
version: 0.1
log: {{level: info}}
storage: {{filesystem: {{rootdirectory: {place}/blobs}}}}
http: {{addr: "127.0.0.1:0"}}
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("registry")
    (place / "config.yml").write_text(_REGISTRY.format(place=place))
    argv = ["docker-registry", "serve", str(place / "config.yml")]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        try:
            for line in child.stderr:
                if found := re.search(rb"listening on (127\.0\.0\.1:\d+)", line):
                    yield found[1].decode()
                    break
        finally:
            child.kill()


async def test_pull(
    images: ImageService, layout: Path, registry: str, reference_tree: Path, place: Path
) -> None:
    reference = f"{registry}/team/tool:1.0"
    run(
        *("skopeo", "copy", "-q", "--dest-tls-verify=false"),
        *(f"oci:{layout}:t", f"docker://{reference}"),
    )
    events = [e async for e in images.pull(PullImage(reference=reference, tls_verify=False))]
    steps = {event.step for event in events if isinstance(event, ImageProgress)}
    assert {"pulling", "converting layer 3 of 3"} <= steps
    record = await images.resolve(reference)
    seen = await overlaid(images, record, place / "seen")
    try:
        assert_same(seen, reference_tree)
    finally:
        mounts.umount(place / "seen")


async def test_what_a_registry_refuses(images: ImageService, registry: str) -> None:
    async def pull(reference: str) -> DsecError:
        with pytest.raises(DsecError) as caught:
            await finish(images.pull(PullImage(reference=reference, tls_verify=False)))
        return caught.value

    assert isinstance(await pull(f"{registry}/team/nothing:1"), NotFound)
    assert isinstance(await pull("127.0.0.1:1/team/nothing:1"), Unavailable)
