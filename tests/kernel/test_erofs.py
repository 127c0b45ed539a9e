"""Our metadata images before the kernel, and fsck.erofs: what was written is what is seen."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsec.base.errors import InvalidRequest, StorageFull
from dsec.images.erofs.data import DataWriter
from dsec.images.erofs.merge import merge
from dsec.images.erofs.read import read_image
from dsec.images.erofs.scan import scan
from dsec.images.erofs.tree import BLOCK, HOLE, OPAQUE_XATTR, Device, Extent, Inode, Tree
from dsec.images.erofs.write import write_image
from dsec.linux import mounts
from tests.unit.images.erofs.trees import (
    ACL,
    CAPABILITY,
    Described,
    RandomTrees,
    describe,
    describe_content,
    describe_directory,
    digest,
    make_data,
)

pytestmark = pytest.mark.needs_root
FILE = stat.S_IFREG | 0o644
DIRECTORY = stat.S_IFDIR | 0o755
LINK = stat.S_IFLNK | 0o777
NAMES = [b"a", b"b", b"c", b"d", b"e"]
SEEDS = range(12)


class Bench:
    """A directory with data files, by digest, and mounts that end with the test."""

    def __init__(self, path: Path, ends: ExitStack) -> None:
        self.path = path
        self.data: dict[str, bytes] = {}
        self._ends = ends
        self._count = 0

    def device(self, data: bytes) -> Device:
        device = Device(digest(data), len(data))
        self.data[device.digest] = data
        self.file_of(device).write_bytes(data)
        return device

    def file_of(self, device: Device) -> Path:
        return self.path / device.digest.removeprefix("sha256:")

    def new(self, name: str) -> Path:
        self._count += 1
        return self.path / f"{name}{self._count}"

    def mount(self, tree: Tree) -> Path:
        image, target = self.new("image"), self.new("mount")
        write_image(tree, image)
        target.mkdir()
        mounts.mount_erofs(image, target, [self.file_of(d) for d in tree.devices])
        self._ends.callback(mounts.umount, target)
        return target

    def overlay(self, lowers: Sequence[Path]) -> Path:
        """Bottom first."""
        target = self.new("overlay")
        target.mkdir()
        mounts.mount_overlay_view([str(lower) for lower in reversed(lowers)], target)
        self._ends.callback(mounts.umount, target)
        return target


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as ends:
        yield Bench(tmp_path, ends)
    assert mounts.mounts_under(tmp_path) == []


def seen(path: Path) -> Described:
    return describe_directory(os.fsencode(path))


def assert_mounted_equal(bench: Bench, tree: Tree) -> Path:
    target = bench.mount(tree)
    assert seen(target) == describe_content(tree, bench.data)
    return target


def directory(**children: Inode) -> Inode:
    return Inode(DIRECTORY, children={os.fsencode(n): inode for n, inode in children.items()})


def fsck(tree: Tree, bench: Bench) -> None:
    """What Debian's 1.5 says; it reads all inodes and directories."""
    image = bench.new("checked")
    write_image(tree, image)
    devices = [f"--device={bench.file_of(device)}" for device in tree.devices]
    argv = ["fsck.erofs", "-d3", "--extract", *devices, str(image)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "<E>" not in done.stderr
    assert done.stderr.endswith("No errors found\n")


# -- the kernel sees what was written ----------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_random_trees_look_as_they_were_written(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    devices = [bench.device(make_data(rng, 100)) for _ in range(seed % 4)]
    tree = RandomTrees(rng, entries=300).make(devices)
    assert_mounted_equal(bench, tree)
    fsck(tree, bench)


def test_counts_of_links(bench: Bench) -> None:
    shared = Inode(FILE)
    tree = Tree(directory(a=shared, b=directory(c=shared, d=directory()), e=directory()))
    target = bench.mount(tree)
    links = {name: (target / name).stat().st_nlink for name in (".", "a", "b", "b/c", "e")}
    assert links == {".": 4, "a": 2, "b": 3, "b/c": 2, "e": 2}


def test_names_of_all_bytes_and_lengths(bench: Bench) -> None:
    root = Inode(DIRECTORY)
    for byte in set(range(1, 256)) - {ord("/"), ord(".")}:
        root.children[bytes([byte])] = Inode(FILE)
    for length in (2, 254, 255):
        root.children[b"n" * length] = Inode(DIRECTORY)
    assert_mounted_equal(bench, Tree(root))


def test_ten_thousand_entries(bench: Bench) -> None:
    names = [b"%d" % n + b"x" * (n % 90) for n in range(10_000)]
    large = Inode(DIRECTORY, children={name: Inode(FILE, uid=n) for n, name in enumerate(names)})
    target = assert_mounted_equal(bench, Tree(directory(large=large)))
    assert not (target / "large/missing").exists()
    fsck(Tree(directory(large=large)), bench)


@pytest.mark.parametrize("extra", range(-3, 4))
def test_directories_that_just_fit_beside_their_inode(bench: Bench, extra: int) -> None:
    root = Inode(DIRECTORY)
    for room in (BLOCK - 64, BLOCK, 2 * BLOCK - 64):
        left = room - 27 + extra
        inner = Inode(DIRECTORY)
        while left > 12:
            name = (b"%06d" % left).ljust(min(left - 12, 200), b"n")[: left - 12]
            inner.children[name] = Inode(FILE)
            left -= 12 + len(name)
        root.children[b"%d" % room] = inner
    assert_mounted_equal(bench, Tree(root))
    fsck(Tree(root), bench)


def test_targets_of_all_lengths(bench: Bench) -> None:
    lengths = [1, 63, 64, 65, 3967, *range(4029, 4036), 4094, 4095]
    links = {b"%d" % n: Inode(LINK, target=b"t" * n) for n in lengths}
    tree = Tree(Inode(DIRECTORY, children=links))
    assert_mounted_equal(bench, tree)
    fsck(tree, bench)


@pytest.mark.parametrize("length", [0, 1, 4000, 30_000])
def test_attributes(bench: Bench, length: int) -> None:
    """Large ones cross blocks, and push what follows the inode out of its block."""
    device = bench.device(os.urandom(BLOCK))
    xattrs = {
        b"user.long": b"v" * length,
        b"user." + b"n" * 250: b"name",
        b"trusted.bytes": bytes(range(256)),
        b"security.capability": CAPABILITY,
        b"system.posix_acl_access": ACL,
    }
    special = {b"trusted.long": b"v" * length}
    inner = directory(file=Inode(FILE, size=5, extents=[Extent(0, 0, 1)], xattrs=xattrs))
    inner.xattrs = {**xattrs, b"system.posix_acl_default": ACL}
    link = Inode(LINK, target=b"t" * 500, xattrs=special)
    pipe = Inode(stat.S_IFIFO | 0o600, xattrs=special)
    null = Inode(stat.S_IFCHR | 0o666, rdev=os.makedev(1, 3), xattrs=special)
    tree = Tree(directory(inner=inner, link=link, pipe=pipe, null=null), [device])
    assert_mounted_equal(bench, tree)


def test_holes_in_a_large_file(bench: Bench) -> None:
    content = os.urandom(3 * BLOCK)
    device = bench.device(content)
    blocks = 6 << 18
    extents = [Extent(HOLE, 0, 5 << 18), Extent(0, 0, 3), Extent(HOLE, 0, (1 << 18) - 3)]
    sparse = Inode(FILE, size=blocks * BLOCK - 7, extents=extents)
    target = bench.mount(Tree(directory(sparse=sparse), [device]))
    with (target / "sparse").open("rb") as file:
        assert os.fstat(file.fileno()).st_size == (6 << 30) - 7
        places = [0, 4 << 30, (5 << 30) - 100, (5 << 30) + len(content), (6 << 30) - 100]
        zeros = [os.pread(file.fileno(), 93, place) for place in places]
        assert zeros == [bytes(93)] * len(places)
        assert os.pread(file.fileno(), len(content), 5 << 30) == content


def test_a_large_file_in_one_chunk(bench: Bench) -> None:
    path = bench.new("large")
    with path.open("wb") as file:
        file.truncate(5 << 30)
        os.pwrite(file.fileno(), b"here", (5 << 30) - 4)
    device = Device("sha256:" + "0" * 64, 5 << 30)
    path.rename(bench.file_of(device))
    large = Inode(FILE, size=5 << 30, extents=[Extent(0, 0, 5 << 18)])
    target = bench.mount(Tree(directory(large=large), [device]))
    with (target / "large").open("rb") as file:
        assert os.pread(file.fileno(), 10, (5 << 30) - 10) == bytes(6) + b"here"


def test_without_its_devices_an_image_gives_errors(bench: Bench) -> None:
    """The kernel mounts it; what is read must not be metadata, nor zeros."""
    device = bench.device(os.urandom(BLOCK))
    image, target = bench.new("image"), bench.new("mount")
    file = Inode(FILE, size=5, extents=[Extent(0, 0, 1)])
    write_image(Tree(directory(file=file), [device]), image)
    target.mkdir()
    mounts.mount_erofs(image, target)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            (target / "file").read_bytes()
    finally:
        mounts.umount(target)


# -- from a directory --------------------------------------------------------------------------


def make_upper(root: Path) -> None:
    """What an overlay's upper directory has, and what only root can make."""
    root.mkdir()
    os.mknod(root / "gone", stat.S_IFCHR, 0)
    (root / "opaque").mkdir()
    os.setxattr(root / "opaque", OPAQUE_XATTR, b"y")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "disk", stat.S_IFBLK | 0o660, os.makedev(259, 70_000))
    (root / "program").write_bytes(os.urandom(200_000))
    os.chown(root / "program", 1000, 70_000)
    os.setxattr(root / "program", "security.capability", CAPABILITY)
    os.setxattr(root / "program", "system.posix_acl_access", ACL)
    (root / "link").symlink_to("program")
    os.setxattr(root / "link", "trusted.x", b"on a link", follow_symlinks=False)
    os.link(root / "program", root / "opaque/again")
    with (root / "sparse").open("wb") as file:
        file.truncate(10 << 20)
        os.pwrite(file.fileno(), b"middle", 5 << 20)


def scanned(bench: Bench, root: Path) -> Tree:
    path = bench.new("data")
    with DataWriter(path) as data:
        tree = scan(root, data)
        device = data.finish()
    if device:
        tree.devices = [device]
        bench.data[device.digest] = path.read_bytes()
        path.rename(bench.file_of(device))
    return tree


def test_a_scanned_directory_looks_as_on_disk(bench: Bench) -> None:
    root = bench.new("root")
    make_upper(root)
    tree = scanned(bench, root)
    assert seen(bench.mount(tree)) == seen(root)
    assert tree.root.children[b"gone"].is_whiteout
    assert tree.root.children[b"opaque"].is_opaque
    (device,) = tree.devices
    assert device.digest == f"sha256:{hashlib.sha256(bench.data[device.digest]).hexdigest()}"
    assert device.size_bytes < 400_000
    fsck(tree, bench)


def test_what_a_sandbox_left_in_its_upper_shows_the_same_over_its_image(bench: Bench) -> None:
    lower, upper, work, merged = (bench.new(n) for n in ("lower", "upper", "work", "merged"))
    make_lower(lower)
    for path in (upper, work, merged):
        path.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mounts.mount("overlay", merged, "overlay", mounts.MountFlag.NODEV, options)
    try:
        change_much(merged)
        expected = seen(merged)
    finally:
        mounts.umount(merged)
    below, above = scanned(bench, lower), scanned(bench, upper)
    assert seen(bench.overlay([bench.mount(below), bench.mount(above)])) == expected
    assert seen(bench.mount(merge([below, above], keep_whiteouts=False))) == expected


def make_lower(root: Path) -> None:
    for name in ("kept", "emptied", "replaced", "remade"):
        (root / name / "inner").mkdir(parents=True)
        (root / name / "inner/file").write_text(name)
    (root / "file").write_text("first")
    (root / "program").write_text("program")
    os.link(root / "file", root / "linked")


def change_much(root: Path) -> None:
    (root / "emptied/inner/file").unlink()
    for name in ("replaced", "remade"):
        shutil.rmtree(root / name)
    (root / "replaced").write_text("a file now")
    (root / "remade/other").mkdir(parents=True)
    (root / "file").write_text("second")
    (root / "program").rename(root / "kept/renamed")
    (root / "kept").chmod(0o700)
    os.link(root / "replaced", root / "again")


def test_a_full_disk_is_named_and_the_writer_goes_on(bench: Bench) -> None:
    disk, small = bench.new("disk"), os.urandom(40_000)
    disk.mkdir()
    mounts.mount("none", disk, "tmpfs", mounts.MountFlag.NODEV, "size=2m")
    try:
        with DataWriter(disk / "data") as data:
            data.append([small], len(small))
            with pytest.raises(StorageFull):
                data.append([os.urandom(3 << 20)], 3 << 20)
            assert data.append([b"more"], 4) == [Extent(0, 10, 1)]
            device = data.finish()
        assert device is not None
        assert device.digest == digest((disk / "data").read_bytes())
        with pytest.raises(StorageFull):
            write_image(Tree(Inode(DIRECTORY, children=many_files())), disk / "image")
    finally:
        mounts.umount(disk)


def many_files() -> dict[bytes, Inode]:
    return {b"%d" % n: Inode(FILE) for n in range(50_000)}


def test_a_mount_inside_is_refused(bench: Bench) -> None:
    root = bench.new("root")
    (root / "inner").mkdir(parents=True)
    mounts.mount("none", root / "inner", "tmpfs", mounts.MountFlag.NODEV)
    try:
        with pytest.raises(InvalidRequest, match="inner is the root of another file system"):
            scanned(bench, root)
    finally:
        mounts.umount(root / "inner")


# -- merged trees show what overlayfs shows ----------------------------------------------------


def random_layers(bench: Bench, rng: random.Random, count: int) -> list[Tree]:
    maker = RandomTrees(rng, NAMES, overlay=True, entries=60)
    devices = [bench.device(make_data(rng, 50)) for _ in range(4)]
    return [maker.make(rng.sample(devices, rng.randint(1, 3))) for _ in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_merged_layers_show_what_their_overlay_shows(bench: Bench, seed: int) -> None:
    layers = random_layers(bench, random.Random(seed), 3)
    stack = [bench.mount(layer) for layer in layers]
    expected = seen(bench.overlay(stack))
    merged = merge(layers, keep_whiteouts=False)
    assert seen(bench.mount(merged)) == expected
    fsck(merged, bench)


@pytest.mark.parametrize("seed", SEEDS)
def test_merged_layers_over_others_show_the_same(bench: Bench, seed: int) -> None:
    layers = random_layers(bench, random.Random(seed), 4)
    bottom, *stack = [bench.mount(layer) for layer in layers]
    expected = seen(bench.overlay([bottom, *stack]))
    merged = bench.mount(merge(layers[1:], keep_whiteouts=True))
    assert seen(bench.overlay([bottom, merged])) == expected
    empty = bench.mount(Tree(directory()))
    lower = bench.mount(merge(layers[:2], keep_whiteouts=True))
    upper = bench.mount(merge(layers[2:], keep_whiteouts=True))
    assert seen(bench.overlay([empty, lower, upper])) == expected


def test_an_image_read_again_is_the_same_image(bench: Bench) -> None:
    layers = random_layers(bench, random.Random(99), 3)
    image = bench.new("image")
    merged = merge(layers, keep_whiteouts=True)
    ref = write_image(merged, image)
    again = read_image(image)
    assert describe(again) == describe(merged)
    assert write_image(again, image) == ref
