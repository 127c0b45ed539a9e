"""Images against the real thing: umoci's unpacking, hostile and damaged archives, real mounts.

Needs root, and umoci, skopeo and zstd of Debian.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dsec.base.errors import (
    InvalidRequest,
    PayloadTooLarge,
    StorageFull,
)
from dsec.images.oci.layer import Limits
from dsec.images.service import ImageService, finish
from dsec.linux import mounts
from tests.kernel.odd_images import (
    anyio_backend,
    first_layer,
    images,
    imported,
    layout,
    place,
    reference_tree,
)
from tests.kernel.trees import assert_same, mounted, overlaid, run
from tests.tars import Tar

__all__ = ["anyio_backend", "images", "layout", "place", "reference_tree"]
pytestmark = [pytest.mark.anyio, pytest.mark.needs_root]


# -- against umoci -----------------------------------------------------------------------------


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
