"""What is written is read again, and nothing else is."""

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.base.errors import InternalError, InvalidRequest
from dsec.images.erofs import format as fmt
from dsec.images.erofs.read import read_image
from dsec.images.erofs.tree import BLOCK, HOLE, Device, Extent, Inode, Tree, join_extents
from dsec.images.erofs.write import encode, write_image
from tests.unit.images.erofs.trees import RANDOM, RandomTrees, describe

DEVICES = [Device("sha256:" + "a" * 64, 100 * BLOCK), Device("sha256:" + "b" * 64, 60 * BLOCK)]
FILE = stat.S_IFREG | 0o644
DIRECTORY = stat.S_IFDIR | 0o755


def round_trip(tree: Tree, image: Path) -> Tree:
    write_image(tree, image)
    return read_image(image)


def directory(**children: Inode) -> Inode:
    return Inode(DIRECTORY, children={os.fsencode(n): inode for n, inode in children.items()})


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("erofs") / "meta.erofs"


@settings(max_examples=80, deadline=None)
@given(RANDOM, st.integers(0, 2))
def test_any_tree_comes_back(image: Path, rng: random.Random, devices: int) -> None:
    tree = RandomTrees(rng, overlay=True).make(DEVICES[:devices])
    found = round_trip(tree, image)
    assert describe(found) == describe(tree)
    assert found.devices == tree.devices


@given(RANDOM)
@settings(max_examples=30, deadline=None)
def test_equal_trees_give_equal_bytes(image: Path, rng: random.Random) -> None:
    tree = RandomTrees(rng).make(DEVICES)
    first = encode(tree)
    write_image(tree, image)
    again = read_image(image)
    for _, inode in again.walk():
        inode.children = dict(reversed(inode.children.items()))
        inode.xattrs = dict(reversed(inode.xattrs.items()))
    assert encode(again) == first


def test_the_answer_tells_the_file(image: Path) -> None:
    ref = write_image(Tree(directory(a=Inode(FILE))), image)
    content = image.read_bytes()
    assert ref.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert ref.size_bytes == len(content) == BLOCK


def test_the_bytes_do_not_change_between_versions() -> None:
    """Layers are known by these bytes: a change here stores every merged layer anew."""
    shared = Inode(FILE, 1, 2, 3, BLOCK, extents=[Extent(1, 5, 1)], xattrs={b"user.a": b"b"})
    inner = directory(link=Inode(stat.S_IFLNK | 0o777, target=b"to"), shared=shared)
    tree = Tree(directory(inner=inner, shared=shared), DEVICES)
    digest = hashlib.sha256(encode(tree)).hexdigest()
    assert digest == "33ae00a8d8d6e7f5d0e3907014b530031e38a26149c82c794d15dd0495ac2f80"


@pytest.mark.parametrize("names", [0, 1, 300, 5000])
def test_directories_of_all_sizes(image: Path, names: int) -> None:
    file = Inode(FILE)
    tree = Tree(Inode(DIRECTORY, children={b"%d" % n: file for n in range(names)}))
    assert describe(round_trip(tree, image)) == describe(tree)


@pytest.mark.parametrize("extra", range(-14, 3))
def test_directories_around_one_block(image: Path, extra: int) -> None:
    """The size at which a listing stops fitting beside its inode, and into one block."""
    for room in (BLOCK - fmt.INODE.size, BLOCK):
        left = room - 2 * fmt.DIRENT.size - 3 + extra
        names = [b"n" * 200 + b"%03d" % n for n in range(left // (fmt.DIRENT.size + 203))]
        rest = left - len(names) * (fmt.DIRENT.size + 203)
        if rest > fmt.DIRENT.size:
            names.append(b"z" * (rest - fmt.DIRENT.size))
        inner = Inode(DIRECTORY, children={name: Inode(FILE) for name in names})
        tree = Tree(directory(a=inner, b=Inode(FILE, xattrs={b"user.a": b"b"})))
        assert describe(round_trip(tree, image)) == describe(tree)


def test_a_file_in_one_piece_costs_one_index() -> None:
    device = Device("sha256:" + "c" * 64, 1 << 40)
    large = Inode(FILE, size=(1 << 40) - 5, extents=[Extent(0, 0, 1 << 28)])
    assert len(encode(Tree(directory(large=large), [device]))) == BLOCK


def test_a_huge_hole_costs_one_index() -> None:
    hole = Inode(FILE, size=1 << 45, extents=[Extent(HOLE, 0, 1 << 33)])
    assert len(encode(Tree(directory(hole=hole)))) == BLOCK


def test_chunks_are_as_large_as_the_extents_allow(image: Path) -> None:
    device = Device("sha256:" + "c" * 64, 1 << 30)
    extents = [Extent(0, 3, 16 * 1000), Extent(HOLE, 0, 16 * 1000), Extent(0, 99_999, 7)]
    file = Inode(FILE, size=(32_000 + 7) * BLOCK - 1, extents=extents)
    tree = Tree(directory(file=file), [device])
    assert len(encode(tree)) == BLOCK
    assert describe(round_trip(tree, image)) == describe(tree)


def test_a_deep_tree(image: Path) -> None:
    tree = Tree(Inode(DIRECTORY))
    inode = tree.root
    for _ in range(3000):
        inode.children[b"d"] = inode = Inode(DIRECTORY)
    found, depth = round_trip(tree, image).root, 0
    while found.children:
        found, depth = found.children[b"d"], depth + 1
    assert depth == 3000


def twice() -> Inode:
    inner = directory()
    return directory(a=inner, b=inner)


def loop() -> Inode:
    inner = directory()
    inner.children[b"again"] = inner
    return directory(a=inner)


def file(**fields: object) -> Callable[[], Inode]:
    return lambda: directory(bad=Inode(**{"mode": FILE, **fields}))  # type: ignore[arg-type]


MISFITS: dict[str, Callable[[], Inode]] = {
    "name of 256 bytes": lambda: Inode(DIRECTORY, children={b"n" * 256: Inode(FILE)}),
    "empty name": lambda: Inode(DIRECTORY, children={b"": Inode(FILE)}),
    "slash": lambda: Inode(DIRECTORY, children={b"a/b": Inode(FILE)}),
    "nul": lambda: Inode(DIRECTORY, children={b"a\0b": Inode(FILE)}),
    "dots": lambda: Inode(DIRECTORY, children={b"..": Inode(FILE)}),
    "directory under two names": twice,
    "directory in itself": loop,
    "target of 4096 bytes": file(mode=stat.S_IFLNK | 0o777, target=b"t" * 4096),
    "empty target": file(mode=stat.S_IFLNK | 0o777),
    "nul in target": file(mode=stat.S_IFLNK | 0o777, target=b"a\0b"),
    "large major": file(mode=stat.S_IFCHR, rdev=os.makedev(4096, 1)),
    "large minor": file(mode=stat.S_IFBLK, rdev=os.makedev(1, 1 << 20)),
    "negative owner": file(uid=-1),
    "large group": file(gid=1 << 32),
    "unknown kind": file(mode=0o070644),
    "no kind": file(mode=0o644),
    "far future": file(mtime_ns=(1 << 63) * 10**9),
    "attribute's name space": file(xattrs={b"system.other": b""}),
    "attribute's value": file(xattrs={b"user.a": bytes(65536)}),
    "attributes in all": file(xattrs={b"user.%d" % n: bytes(65535) for n in range(5)}),
    "too few extents": file(size=BLOCK + 1, extents=[Extent(HOLE, 0, 1)]),
    "unknown device": file(size=1, extents=[Extent(2, 0, 1)]),
    "behind the device": file(size=BLOCK, extents=[Extent(1, 60, 1)]),
    "before the device": file(size=BLOCK, extents=[Extent(1, -1, 1)]),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_by_name(image: Path, case: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^(bad|/|a|b|a/again) cannot be kept: "):
        write_image(Tree(MISFITS[case](), DEVICES), image)


def test_too_much_data_is_refused(image: Path) -> None:
    device = Device("sha256:" + "c" * 64, 9 << 40)
    with pytest.raises(InvalidRequest, match="larger than 16 TiB"):
        write_image(Tree(directory(), [device, Device("sha256:" + "d" * 64, 9 << 40)]), image)


def test_too_much_metadata_is_refused(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "MAX_IMAGE_BYTES", BLOCK)
    write_image(Tree(directory()), image)
    links = {f"{n}": Inode(stat.S_IFLNK | 0o777, target=b"t" * 3000) for n in range(2)}
    with pytest.raises(InvalidRequest, match="its metadata is larger than"):
        write_image(Tree(directory(**links)), image)


def test_a_file_with_too_many_holes_is_refused(image: Path) -> None:
    extents = [Extent(HOLE, 0, 1), Extent(0, 0, 1), Extent(HOLE, 0, 1 << 23)]
    file = Inode(FILE, size=(2 + (1 << 23)) * BLOCK, extents=extents)
    with pytest.raises(InvalidRequest, match=r"^bad cannot be kept: .*holes are too many"):
        write_image(Tree(directory(bad=file), DEVICES), image)


def test_an_image_that_is_too_large_is_not_read(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(fmt.MAX_IMAGE_BYTES + 1)
    with pytest.raises(InternalError, match="larger than 256 MiB"):
        read_image(image)
    image.unlink()


def test_too_many_devices_are_refused(image: Path) -> None:
    devices = [Device(f"sha256:{n:064x}", BLOCK) for n in range(fmt.MAX_DEVICES + 1)]
    with pytest.raises(InvalidRequest, match="more than 16000"):
        write_image(Tree(directory(), devices), image)
    write_image(Tree(directory(), devices[:-1]), image)
    assert read_image(image).devices == devices[:-1]


# -- hostile images ----------------------------------------------------------------------------


def sealed(content: bytearray) -> bytes:
    """With a checksum that is right again."""
    content[fmt.CHECKSUM_AT : fmt.CHECKSUM_AT + 4] = fmt.checksum(content).to_bytes(4, "little")
    return bytes(content)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_a_damaged_image_is_refused_or_read(
    image: Path, seed: int, changes: list[tuple[int, int]]
) -> None:
    tree = RandomTrees(random.Random(seed), entries=60).make(DEVICES)
    content = bytearray(encode(tree))
    for at, value in changes:
        content[fmt.SUPER_AT + at % (len(content) - fmt.SUPER_AT)] = value
    image.write_bytes(sealed(content))
    try:
        found = read_image(image)
    except InternalError as error:
        assert str(image) in str(error)
    else:
        assert len(list(found.walk())) <= len(content) // fmt.DIRENT.size


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_cut_image_is_refused(image: Path, length: int) -> None:
    content = encode(RandomTrees(random.Random(3), entries=60).make(DEVICES))
    image.write_bytes(content[: length % len(content)])
    with pytest.raises(InternalError, match=r"meta\.erofs"):
        read_image(image)


def test_a_changed_superblock_is_refused(image: Path) -> None:
    content = bytearray(encode(Tree(directory(), DEVICES)))
    content[fmt.DEVICE_SLOT * fmt.DEVICE.size] ^= 1
    image.write_bytes(content)
    with pytest.raises(InternalError, match="checksum"):
        read_image(image)


def nid_of(content: bytearray, ino: int) -> int:
    """Of the inode with that number: they follow each other."""
    at = int.from_bytes(content[fmt.SUPER_AT + 14 : fmt.SUPER_AT + 16], "little")
    while fmt.INODE.unpack_from(content, at * fmt.SLOT)[6] != ino:
        at += 1
    return at


def test_a_loop_of_directories_is_refused(image: Path) -> None:
    content = bytearray(encode(Tree(directory(a=directory(b=directory())))))
    root, inner = nid_of(content, 1), nid_of(content, 3)
    at = content.index(fmt.DIRENT.pack(inner, 39, 2, 0))
    content[at : at + 8] = root.to_bytes(8, "little")
    image.write_bytes(sealed(content))
    with pytest.raises(InternalError, match="two names"):
        read_image(image)


def test_links_that_share_their_target_are_refused(image: Path) -> None:
    """A small image must not say a large tree."""
    link = stat.S_IFLNK | 0o777
    links = {b"%03d" % n: Inode(link, target=b"t") for n in range(500)}
    links[b"a"] = Inode(link, target=b"t" * 4095)
    content = bytearray(encode(Tree(Inode(DIRECTORY, children=links))))
    long = nid_of(content, 502) * fmt.SLOT
    for number in range(2, 502):
        at = nid_of(content, number) * fmt.SLOT
        content[at : at + 20] = content[long : long + 20]
    image.write_bytes(sealed(content))
    with pytest.raises(InternalError, match="overlap"):
        read_image(image)


def test_another_writers_image_is_refused(image: Path) -> None:
    content = bytearray(encode(Tree(directory())))
    content[fmt.SUPER_AT + 48] ^= 1
    image.write_bytes(sealed(content))
    with pytest.raises(InternalError, match="not of ours"):
        read_image(image)


# -- extents -----------------------------------------------------------------------------------


def test_extents_that_follow_each_other_are_joined() -> None:
    apart = [Extent(0, 1, 2), Extent(0, 3, 1), Extent(HOLE, 0, 1), Extent(HOLE, 0, 4)]
    apart += [Extent(1, 4, 1), Extent(0, 5, 1), Extent(0, 5, 1)]
    joined = [
        Extent(0, 1, 3),
        Extent(HOLE, 0, 5),
        Extent(1, 4, 1),
        Extent(0, 5, 1),
        Extent(0, 5, 1),
    ]
    assert join_extents(apart) == joined
