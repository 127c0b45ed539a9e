from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
import zstandard

from dsec.base.errors import DataUnavailable, InvalidRequest
from dsec.images.pack import ChunkTable, Span, compress_file, decompress_file, pack
from dsec.images.records import Packed
from dsec.images.store.interface import BlobRef

pytestmark = [pytest.mark.anyio]

CHUNK = 65536


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def ref(data: bytes) -> BlobRef:
    return BlobRef(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))


def sample(chunks: int, tail: int = 4096) -> bytes:
    """Text, noise and zeros by turns, and a short last chunk."""
    made = random.Random(1)
    kinds = [
        lambda: b"some text that repeats %d " % made.randrange(1000) * 3000,
        lambda: made.randbytes(CHUNK),
        lambda: bytes(CHUNK),
    ]
    return b"".join(kinds[at % 3]()[:CHUNK] for at in range(chunks)) + b"t" * tail


async def packed(place: Path, data: bytes, chunk_bytes: int = CHUNK) -> tuple[Packed, bytes, bytes]:
    (place / "raw").write_bytes(data)
    (place / "out").mkdir(exist_ok=True)
    done = await pack(place / "raw", place / "out", chunk_bytes)
    return done, (place / "out/pack").read_bytes(), (place / "out/table").read_bytes()


@pytest.mark.parametrize("chunks", [0, 1, 3, 64, 300])
@pytest.mark.parametrize("chunk_bytes", [4096, CHUNK])
async def test_every_chunk_comes_back(tmp_path: Path, chunks: int, chunk_bytes: int) -> None:
    data = sample(chunks)
    done, stored, table = await packed(tmp_path, data, chunk_bytes)
    assert (done.pack, done.table) == (ref(stored), ref(table))
    assert (done.chunk_bytes, done.raw) == (chunk_bytes, False)
    found = ChunkTable(table, len(data), chunk_bytes, len(stored))
    assert found.count == -(-len(data) // chunk_bytes)
    raw = b"".join(
        found.unpack_chunk(chunk, memoryview(stored)[span.offset : span.offset + span.length])
        for chunk, span in enumerate(found.spans(0, found.count))
    )
    assert raw == data


async def test_the_same_input_gives_the_same_output(tmp_path: Path) -> None:
    data = sample(200)
    assert await packed(tmp_path, data) == await packed(tmp_path, data)


async def test_zeros_are_not_stored(tmp_path: Path) -> None:
    _, stored, table = await packed(tmp_path, bytes(10 * CHUNK))
    assert stored == b""
    found = ChunkTable(table, 10 * CHUNK, CHUNK, 0)
    assert found.joint_span(0, 10) == Span(0, 0)
    assert found.unpack_chunk(9, b"") == bytes(CHUNK)
    with pytest.raises(DataUnavailable):
        found.unpack_chunk(9, b"x")


async def test_progress(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(sample(500))
    told: list[int] = []
    await pack(tmp_path / "raw", tmp_path, on_progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 500 * CHUNK + 4096


@pytest.mark.parametrize(
    ("size", "chunk_bytes"), [(0, CHUNK), (4096, 0), (4096, 1000), (1, 1 << 30)]
)
async def test_what_cannot_be_packed(tmp_path: Path, size: int, chunk_bytes: int) -> None:
    (tmp_path / "raw").write_bytes(bytes(size))
    with pytest.raises(InvalidRequest):
        await pack(tmp_path / "raw", tmp_path, chunk_bytes)


async def test_spans_lie_back_to_back(tmp_path: Path) -> None:
    data = sample(30)
    _, stored, table = await packed(tmp_path, data)
    found = ChunkTable(table, len(data), CHUNK, len(stored))
    spans = found.spans(5, 7)
    assert found.joint_span(5, 7) == Span(spans[0].offset, sum(s.length for s in spans))
    assert found.stored_span(0).offset == 0
    for chunk in (-1, found.count):
        with pytest.raises(IndexError):
            found.stored_span(chunk)


async def test_a_table_for_something_else(tmp_path: Path) -> None:
    data = sample(4)
    _, stored, table = await packed(tmp_path, data)
    for wrong in [
        (table[:-1], len(data), CHUNK, len(stored)),
        (table, len(data) + CHUNK, CHUNK, len(stored)),
        (table, len(data), CHUNK, len(stored) + 1),
        (table[36:], len(data), CHUNK, len(stored)),
        (b"", len(data), CHUNK, 0),
    ]:
        with pytest.raises(DataUnavailable):
            ChunkTable(*wrong)


async def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    data = sample(0)
    _, stored, table = await packed(tmp_path, data)
    found = ChunkTable(table, len(data), CHUNK, len(stored))
    for at in range(len(stored)):
        spoiled = bytearray(stored)
        spoiled[at] ^= 1
        with pytest.raises(DataUnavailable):
            found.unpack_chunk(0, bytes(spoiled))
    for other in (stored[:-1], stored + b"x", b""):
        with pytest.raises(DataUnavailable):
            found.unpack_chunk(0, other)


def trusting(stored: bytes, size_bytes: int = 4096) -> ChunkTable:
    """A table that vouches for anything, as a hostile publisher would write one."""
    table = len(stored).to_bytes(4, "little") + hashlib.sha256(stored).digest()
    return ChunkTable(table, size_bytes, CHUNK, len(stored))


@pytest.mark.parametrize(
    "stored",
    [
        zstandard.compress(bytes(1 << 28)),
        zstandard.compress(b"x" * 4095),
        zstandard.compress(b"x" * 4096) + zstandard.compress(b"y"),
        zstandard.compress(b"x" * 4096) + b"junk",
        zstandard.compress(b"x" * 4096)[:-2],
        zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 4096),
        b"not zstd at all",
        b"x",
    ],
    ids=["bomb", "short", "two frames", "junk after", "cut", "no size", "no zstd", "a byte"],
)
def test_what_is_vouched_for_and_yet_wrong(stored: bytes) -> None:
    with pytest.raises(DataUnavailable):
        trusting(stored).unpack_chunk(0, stored)


def test_a_frame_that_lies_about_its_size() -> None:
    stored = bytearray(zstandard.compress(os.urandom(4097)))
    size_at = stored.index((4097 - 256).to_bytes(2, "little"))
    stored[size_at : size_at + 2] = (4096 - 256).to_bytes(2, "little")
    with pytest.raises(DataUnavailable):
        trusting(bytes(stored)).unpack_chunk(0, bytes(stored))


# -- whole files -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_a_file_comes_back(tmp_path: Path, size: int) -> None:
    data = (b"metadata %d " * (size // 8 + 1))[:size]
    raw, small, again = (tmp_path / name for name in ("raw", "small", "again"))
    raw.write_bytes(data)
    blob = compress_file(raw, small)
    assert blob == ref(small.read_bytes())
    decompress_file(small, again, ref(data), 4 << 20)
    assert again.read_bytes() == data


def test_a_file_that_comes_out_as_something_else(tmp_path: Path) -> None:
    data = b"x" * 100000
    raw, small, out = (tmp_path / name for name in ("raw", "small", "out"))
    raw.write_bytes(data)
    compress_file(raw, small)
    good = small.read_bytes()
    for expected, limit, content in [
        (ref(b"y" * 100000), 1 << 20, good),
        (BlobRef(ref(data).digest, 99999), 1 << 20, good),
        (ref(data), 99999, good),
        (ref(data), 1 << 20, good[:-3]),
        (ref(data), 1 << 20, b"junk" + good),
        (ref(data), 1 << 20, b""),
    ]:
        small.write_bytes(content)
        with pytest.raises(DataUnavailable):
            decompress_file(small, out, expected, limit)
        assert not out.exists()


def test_a_bomb_stops_at_what_is_expected(tmp_path: Path) -> None:
    bomb, out = tmp_path / "bomb", tmp_path / "out"
    bomb.write_bytes(zstandard.compress(bytes(1 << 30)))
    with pytest.raises(DataUnavailable):
        decompress_file(bomb, out, ref(b"x" * 10), 1 << 40)
    assert not out.exists()
