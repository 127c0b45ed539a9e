"""Content into the data file and back by its extents."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.base.errors import InvalidRequest
from dsec.images.erofs.data import DataWriter, Zeros
from dsec.images.erofs.tree import BLOCK, HOLE, Extent
from tests.unit.images.erofs.trees import digest

GRANULE = 64 << 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


def content_of(data: bytes, extents: list[Extent], size: int) -> bytes:
    parts = [
        bytes(e.blocks * BLOCK)
        if e.device == HOLE
        else data[e.block * BLOCK : (e.block + e.blocks) * BLOCK]
        for e in extents
    ]
    return b"".join(parts)[:size]


def make_content(rng: random.Random) -> bytes:
    size = rng.choice([0, 1, 4095, 4096, 4097, GRANULE - 1, GRANULE, GRANULE + 1, 300_000, 3 << 20])
    content = bytearray(rng.randbytes(size))
    for _ in range(rng.randrange(4)):
        start = rng.randrange(size + 1)
        length = rng.choice([1, 4096, GRANULE, 3 * GRANULE])
        content[start : start + length] = bytes(len(content[start : start + length]))
    return bytes(content)


def pieces(content: bytes, rng: random.Random) -> Iterator[bytes | Zeros]:
    """A stream in pieces of odd sizes, some zeros not spelled out."""
    at = 0
    while at < len(content):
        piece = content[at : at + rng.choice([1000, 70_000, 500_000])]
        yield piece if any(piece) or rng.random() < 0.5 else Zeros(len(piece))
        at += len(piece)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_content_comes_back(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("data") / "data"
    contents = [make_content(rng) for _ in range(6)]
    contents += rng.choices(contents, k=4)
    with DataWriter(path) as writer:
        found = [
            writer.append(rng.choice([io.BytesIO(c), pieces(c, rng)]), len(c)) for c in contents
        ]
        device = writer.finish()
    data = path.read_bytes()
    path.unlink()
    assert [content_of(data, e, len(c)) for e, c in zip(found, contents, strict=True)] == contents
    assert (device.digest, device.size_bytes) == (digest(data), len(data)) if device else not data


@pytest.mark.parametrize("size", [1, GRANULE - 1, GRANULE, 5 << 20])
def test_the_same_content_is_kept_once(path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    with DataWriter(path) as writer:
        first = writer.append(io.BytesIO(content), size)
        other = writer.append([b"other"], 5)
        assert writer.append(pieces(content, random.Random(1)), size) == first
        last = writer.append([b"last"], 4)
        device = writer.finish()
    blocks = -(-size // BLOCK)
    assert [first, other, last] == [
        [Extent(0, 0, blocks)],
        [Extent(0, blocks, 1)],
        [Extent(0, blocks + 1, 1)],
    ]
    assert device is not None
    assert device.digest == digest(path.read_bytes())
    assert device.size_bytes == path.stat().st_size == (blocks + 2) * BLOCK


def test_content_that_differs_only_in_where_its_holes_are_is_not_the_same(path: Path) -> None:
    some, none = b"x" * GRANULE, bytes(GRANULE)
    with DataWriter(path) as writer:
        first = writer.append([some + none + none], 3 * GRANULE)
        second = writer.append([none + some + none], 3 * GRANULE)
    assert first == [Extent(0, 0, 16), Extent(HOLE, 0, 32)]
    assert second == [Extent(HOLE, 0, 16), Extent(0, 16, 16), Extent(HOLE, 0, 16)]


def test_zeros_of_a_small_file_are_data(path: Path) -> None:
    with DataWriter(path) as writer:
        assert writer.append([Zeros(GRANULE - 1)], GRANULE - 1) == [Extent(0, 0, 16)]


def test_a_huge_hole_takes_neither_room_nor_time(path: Path) -> None:
    with DataWriter(path) as writer:
        extents = writer.append([Zeros(8 << 40), b"end"], (8 << 40) + 3)
        device = writer.finish()
    assert [e.device for e in extents] == [HOLE, 0]
    assert device is not None
    assert device.size_bytes == BLOCK


def test_a_file_without_content_has_no_extents(path: Path) -> None:
    with DataWriter(path) as writer:
        assert writer.append(io.BytesIO(b"not looked at"), 0) == []
        assert writer.append([Zeros(1 << 20)], 1 << 20) == [Extent(HOLE, 0, 256)]
        assert writer.finish() is None
    assert path.stat().st_size == 0


@pytest.mark.parametrize("size", [10, GRANULE, 5 << 20])
def test_a_short_stream_leaves_the_writer_as_it_was(path: Path, size: int) -> None:
    with DataWriter(path) as writer:
        writer.append([b"before"], 6)
        with pytest.raises(InvalidRequest, match="ends 1 bytes early"):
            writer.append(io.BytesIO(b"x" * (size - 1)), size)
        assert writer.append([b"after"], 5) == [Extent(0, 1, 1)]
        device = writer.finish()
    assert path.read_bytes() == b"before".ljust(BLOCK, b"\0") + b"after".ljust(BLOCK, b"\0")
    assert device is not None
    assert device.digest == digest(path.read_bytes())


def test_a_stream_that_fails_leaves_the_writer_as_it_was(path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x" * (3 << 20)
        raise ZeroDivisionError

    with DataWriter(path) as writer:
        with pytest.raises(ZeroDivisionError):
            writer.append(failing(), 4 << 20)
        assert writer.append([b"after"], 5) == [Extent(0, 0, 1)]
        writer.finish()
    assert path.stat().st_size == BLOCK


def test_only_as_much_as_asked_for_is_taken(path: Path) -> None:
    stream = io.BytesIO(b"onetwo")
    with DataWriter(path) as writer:
        writer.append(stream, 3)
        assert stream.read() == b"two"


def test_a_file_no_device_can_hold_is_refused(path: Path) -> None:
    with DataWriter(path) as writer, pytest.raises(InvalidRequest, match="16 TiB"):
        writer.append([Zeros(1 << 60)], 1 << 60)


def test_a_file_that_exists_is_not_written_over(path: Path) -> None:
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        DataWriter(path)
    assert path.read_bytes() == b"precious"
