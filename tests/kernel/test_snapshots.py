"""Snapshots of real overlays: what is restored is what was there."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.base.errors import (
    Conflict,
    InternalError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StorageFull,
)
from dsec.images import packing
from dsec.images.oci.layer import Limits
from dsec.images.records import DIFFERENCE
from dsec.images.service import ImageService
from dsec.linux import mounts
from dsec.wire.public_v1 import EnvironmentRef, LintRequest
from dsec.wire.sandbox import Pack
from tests.kernel.nodes import imported, published, seen, tar_of
from tests.kernel.trees import assert_same, inventory
from tests.kernel.uppers import Box, aged, boxed, change_much
from tests.tars import Tar

pytestmark = [pytest.mark.needs_root]
BASE = EnvironmentRef(image="base")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def run_dir() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="dsec-s"))
    yield place
    assert mounts.mounts_under(place) == []
    shutil.rmtree(place)


@pytest.fixture
async def images(tmp_path: Path, run_dir: Path) -> AsyncIterator[ImageService]:
    async with ImageService(tmp_path / "images", run_dir) as service:
        await imported(service, "base", base())
        yield service


def base() -> bytes:
    tar = Tar().dirs("etc", "usr", "usr/bin", "usr/share", "usr/share/dir", "usr/share/dir/in")
    tar.dirs("usr/share/emptied", "usr/share/emptied/inner", "root", "tmp")
    tar.add("etc/os-release", content=b"ID=test\n").add("usr/bin/tool", content=b"tool" * 50_000)
    for name in ("gone", "dir/in/file", "emptied/inner/file", "linked"):
        tar.add(f"usr/share/{name}", content=name.encode())
    return tar.data()


async def test_what_is_restored_is_what_was_there(images: ImageService, tmp_path: Path) -> None:
    async with boxed(images, BASE, "box", tmp_path) as box:
        change_much(box.root)
        shown = await box.pack(images, "first")
        expected = inventory(box.root)
    assert (shown.image, shown.parent, shown.depth) == ("snapshots/root/first", "base:latest", 1)
    assert shown.left_out == 0
    async with seen(images, EnvironmentRef(image=shown.image), "again", tmp_path) as root:
        assert_same(root, expected)
    async with boxed(images, EnvironmentRef(image=shown.image), "box2", tmp_path) as again:
        assert_same(again.root, expected)


async def test_residue_stays_behind_and_deletions_do_not(
    images: ImageService, tmp_path: Path
) -> None:
    async with boxed(images, BASE, "box", tmp_path) as box:
        for name in ("root/.bash_history", "root/.ssh/id_rsa", "var/log/app/app.log", "tmp/a/b"):
            path = box.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("secret")
        (box.root / "srv").mkdir(exist_ok=True)
        (box.root / "srv/result").write_text("result")
        (box.root / "srv/cache").mkdir()
        (box.root / "srv/cache/entry").write_text("entry")
        (box.root / "usr/share/gone").unlink()
        (box.root / "root/.ssh/id_rsa.pub").write_text("public")
        clean = await box.pack(images, "clean", exclude=["/srv/cache/**"])
        everything = await box.pack(images, "all", clean=False)
    assert (clean.cleaned, clean.left_out) == (True, 6)  # five files, and the directory /tmp/a
    assert (everything.cleaned, everything.left_out) == (False, 0)
    async with seen(images, EnvironmentRef(image=clean.image), "s1", tmp_path) as root:
        assert (root / "srv/result").read_text() == "result"
        assert list((root / "tmp").iterdir()) == []
        assert list((root / "var/log/app").iterdir()) == []
        assert list((root / "srv/cache").iterdir()) == []
        assert [path.name for path in (root / "root").rglob("*")] == [".ssh", "id_rsa.pub"]
        assert not (root / "usr/share/gone").exists()
    async with seen(images, EnvironmentRef(image=everything.image), "s2", tmp_path) as root:
        assert (root / "tmp/a/b").read_text() == "secret"


async def test_differences_are_told_by_path(images: ImageService, tmp_path: Path) -> None:
    async with boxed(images, BASE, "box", tmp_path) as box:
        (box.root / "etc/os-release").write_text("ID=other\n")
        (box.root / "usr/share/gone").unlink()
        shutil.rmtree(box.root / "usr/share/dir")
        (box.root / "usr/share/dir").mkdir()
        (box.root / "usr/share/dir/other").symlink_to("x")
        (box.root / "usr/bin").chmod(0o700)
        (box.root / "new").mkdir()
        (box.root / os.fsdecode(b"new/\xff")).write_bytes(b"12345")
        now = await images.snapshots.diff(box.upper, box.environment)
        shown = await box.pack(images, "told")
    assert [(entry.path, entry.change, entry.kind) for entry in now] == [
        ("/etc/os-release", "modified", "file"),
        ("/new", "added", "dir"),
        ("/new/\\xff", "added", "file"),
        ("/usr/bin", "modified", "dir"),
        ("/usr/share/dir/in", "removed", "dir"),
        ("/usr/share/dir/other", "added", "symlink"),
        ("/usr/share/gone", "removed", "file"),
    ]
    assert (now[2].path_b64, now[2].size_bytes) == (b"/new/\xff", 5)
    assert await images.snapshots.changes("root", shown.name) == now


async def test_many_differences_are_stacked_and_merged(
    images: ImageService, tmp_path: Path
) -> None:
    wanted, expected = BASE, dict[str, dict[str, object]]()
    for number in range(1, packing.MAX_STACKED + 3):
        async with boxed(images, wanted, f"box{number}", tmp_path) as box:
            (box.root / f"file{number}").write_text(str(number))
            (box.root / "last").write_text(str(number))
            (box.root / f"file{number - 2}").unlink(missing_ok=True)
            shown = await box.pack(images, f"snap{number}")
            expected = inventory(box.root)
        assert shown.depth == number
        wanted = EnvironmentRef(image=shown.image)
        environment = await images.environments.compose(wanted)
        assert [part.label for part in environment.parts] == ["image", DIFFERENCE]
    environment = await images.environments.compose(wanted)
    assert len(environment.parts[1].layers) == 2  # nine in one, and the tenth
    async with seen(images, wanted, "again", tmp_path) as root:
        assert_same(root, expected)
    changes = await images.snapshots.changes("root", f"snap{packing.MAX_STACKED + 2}")
    assert [(entry.path, entry.change) for entry in changes] == [
        ("/file10", "added"),
        ("/file8", "removed"),
        ("/last", "modified"),
    ]


async def test_snapshots_over_workspaces_and_under_them(
    images: ImageService, tmp_path: Path
) -> None:
    await published(images, "workspace", "task:v1", tar_of({"task/a": b"a"}))
    await published(images, "toolkit", "lint:v1", tar_of({"opt/lint": b"one", "task/b": b"b"}))
    ref = EnvironmentRef(image="base", workspace="task", toolkits=["lint"])
    async with boxed(images, ref, "box", tmp_path) as box:
        (box.root / "task/a").write_text("changed")
        shown = await box.pack(images, "over")
    wanted = EnvironmentRef(image=shown.image, toolkits=["lint"])
    environment = await images.environments.compose(wanted)
    labels = ["image", "workspace task:v1", "toolkit lint:v1", DIFFERENCE, "toolkit lint:v1"]
    assert [part.label for part in environment.parts] == labels
    async with seen(images, wanted, "again", tmp_path) as root:
        assert (root / "task/a").read_text() == "changed"
        assert (root / "task/b").read_text() == "b"
    report = await images.lint(LintRequest(image=shown.image))
    assert report.environment.image == shown.image


async def test_names(images: ImageService, tmp_path: Path) -> None:
    snapshots = images.snapshots
    async with boxed(images, BASE, "box", tmp_path) as box:
        first = await box.pack(images, "A.first_1")
        with pytest.raises(Conflict):
            await box.pack(images, "A.first_1")
        second = await box.pack(images, "second")
    assert [view.name for view in await snapshots.list("root")] == ["second", "A.first_1"]
    assert await snapshots.list("other") == []
    assert await snapshots.get("root", "second") == second
    assert await snapshots.by_image(f"{first.image}:latest") == first
    assert await snapshots.by_image("base") is None
    assert await snapshots.by_image("snapshots/root/none") is None
    assert [view.name for view in await images.list_images()] == ["base:latest"]
    with pytest.raises(InvalidRequest):
        await imported(images, "snapshots/root/mine", base())
    with pytest.raises(NotFound):
        await snapshots.remove("other", "second")
    async with seen(images, EnvironmentRef(image=first.image), "user", tmp_path):
        await snapshots.remove("root", "second")  # another name of the same layers
        with pytest.raises(Conflict):
            await snapshots.remove("root", first.name)
    await snapshots.remove("root", first.name)
    with pytest.raises(NotFound):
        await snapshots.get("root", first.name)
    assert not images.layers.has(first.digest)


async def test_a_fork_stands_on_a_layer_without_a_name(
    images: ImageService, tmp_path: Path
) -> None:
    async with boxed(images, BASE, "box", tmp_path) as box:
        change_much(box.root)
        wanted = Pack(name="fork", clean=False)
        async with images.snapshots.packing(box.upper, box.environment, wanted) as work:
            await work.look()
            await work.take()
            digest = await work.layer()
            environment = await work.over(digest)
            await images.environments.hold(environment, "child")
        expected = inventory(box.root)
    await images.collect()
    async with boxed(images, environment, "box2", tmp_path) as child:
        assert_same(child.root, expected)
    await images.environments.release("child")
    await images.environments.unmount_unused()
    assert digest in await images.collect()
    assert await images.snapshots.list("root") == []


async def test_what_is_kept_outlives_the_service(tmp_path: Path, run_dir: Path) -> None:
    async with ImageService(tmp_path / "images", run_dir) as images:
        await imported(images, "base", base())
        async with boxed(images, BASE, "box", tmp_path) as box:
            (box.root / "file").write_text("kept")
            shown = await box.pack(images, "kept")
    async with ImageService(tmp_path / "images", run_dir) as images:
        assert await images.snapshots.get("root", "kept") == shown
        await images.collect()
        async with seen(images, EnvironmentRef(image=shown.image), "again", tmp_path) as root:
            assert (root / "file").read_text() == "kept"


# -- large ones, and hostile ones ------------------------------------------------------------------


async def test_a_large_difference_is_packed_in_a_child(
    images: ImageService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with boxed(images, BASE, "box", tmp_path) as box:
        change_much(box.root)
        (box.root / "root/.bash_history").write_text("secret")
        small = await box.pack(images, "small")
        monkeypatch.setattr(packing, "SMALL", Limits(entries=5, size_bytes=1))

        async def take(*_: object) -> None:
            raise AssertionError("taken in a thread")

        monkeypatch.setattr(packing.InThreads, "take", take)
        large = await box.pack(images, "large")
    assert (large.digest, large.left_out) == (small.digest, small.left_out)


async def test_a_child_that_dies_is_told_and_leaves_nothing(
    images: ImageService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SMALL", Limits(entries=0, size_bytes=0))
    async with boxed(images, BASE, "box", tmp_path) as box:
        (box.root / "file").write_text("file")
        wanted = Pack(name="fails")
        async with images.snapshots.packing(box.upper, box.environment, wanted) as work:
            await work.look()
            (box.upper / "file").unlink()
            shutil.rmtree(tmp_path / "images/tmp" / work.work.directory.name)

            async def taken() -> str:
                await work.take()  # by then it may have opened all it needs for that
                return await work.layer()

            with pytest.raises((InternalError, FileNotFoundError)):
                await taken()
    assert list((tmp_path / "images/tmp").iterdir()) == []
    assert await images.snapshots.list("root") == []


async def test_what_becomes_large_between_the_looks_is_packed_in_a_child(
    images: ImageService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "GROWN", Limits(entries=100, size_bytes=10_000))
    async with boxed(images, BASE, "box", tmp_path) as box:
        wanted = Pack(name="grown")
        async with images.snapshots.packing(box.upper, box.environment, wanted) as work:
            await work.look()
            (box.root / "large").write_bytes(b"large" * 10_000)
            assert not await work.take()
            await work.look()
            assert isinstance(work._worker, packing.InChild)
            assert await work.take()
            shown = await work.keep(box.facts("grown"))
    async with seen(images, EnvironmentRef(image=shown.image), "again", tmp_path) as root:
        assert (root / "large").read_bytes() == b"large" * 10_000


@pytest.mark.adversarial
@pytest.mark.parametrize("is_small", [True, False])
async def test_hostile_trees_are_refused(
    images: ImageService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    if not is_small:
        monkeypatch.setattr(packing, "SMALL", Limits(entries=0, size_bytes=0))
    async with boxed(images, BASE, "box", tmp_path) as box:
        deep = box.root
        for _ in range(300):
            deep /= "d"
        deep.mkdir(parents=True)
        with pytest.raises(InvalidRequest, match="nested deeper"):
            await box.pack(images, "deep")
        with pytest.raises(InvalidRequest, match="nested deeper"):
            await images.snapshots.diff(box.upper, box.environment)
        shutil.rmtree(box.root / "d")
        monkeypatch.setattr(images.snapshots, "_limits", Limits(entries=100, size_bytes=1 << 20))
        (box.root / "many").mkdir()
        for number in range(120):
            (box.root / f"many/{number}").touch()
        with pytest.raises(PayloadTooLarge, match="100 entries"):
            await box.pack(images, "many")
        shutil.rmtree(box.root / "many")
        (box.root / "large").write_bytes(bytes(2 << 20))
        with pytest.raises(PayloadTooLarge, match="1048576 bytes"):
            await box.pack(images, "large")
    assert list((tmp_path / "images/tmp").iterdir()) == []
    assert await images.snapshots.list("root") == []


async def test_stores_into_mappings_are_seen(images: ImageService, tmp_path: Path) -> None:
    async with boxed(images, BASE, "box", tmp_path) as box:
        (box.root / "mapped").write_bytes(bytes(100_000))
        file = os.open(box.root / "mapped", os.O_RDWR)
        with mmap.mmap(file, 100_000) as memory:
            os.close(file)
            memory[0] = 1  # the page is dirty from here on: what comes leaves no trace
            aged(box.upper / "mapped")
            wanted = Pack(name="mapped")
            async with images.snapshots.packing(box.upper, box.environment, wanted) as work:
                await work.look()
                before = (box.upper / "mapped").stat()
                memory[1] = 2
                assert (box.upper / "mapped").stat().st_ctime_ns == before.st_ctime_ns
                await work.take()
                shown = await work.keep(box.facts("mapped"))
    async with seen(images, EnvironmentRef(image=shown.image), "again", tmp_path) as root:
        assert (root / "mapped").read_bytes()[:3] == b"\1\2\0"


async def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, run_dir: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts.mount("none", disk, "tmpfs", mounts.MountFlag.NODEV, "size=12m")
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "noise").write_bytes(os.urandom(14 << 20))
    try:
        async with ImageService(disk / "images", run_dir) as images:
            await imported(images, "base", base())
            environment = await images.environments.compose(BASE)
            box = Box("box", environment, tmp_path)
            box.upper = upper
            for look in (True, False):
                with pytest.raises(StorageFull):
                    await box.pack(images, "full", look=look)
            assert list((disk / "images/tmp").iterdir()) == []
            assert await images.snapshots.list("root") == []
            (upper / "noise").write_bytes(os.urandom(1 << 20))
            assert (await box.pack(images, "fits")).size_bytes == 1 << 20
    finally:
        mounts.umount(disk, detach=True)
