from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.images import tracing
from dsec.images.erofs.tree import HOLE, Device, Extent, Inode, Tree
from dsec.images.overlaid import Part
from dsec.images.tracing import MAX_FILES, Ranges, trace_view
from dsec.wire.filler import ReadSpan, Recording
from dsec.wire.public_v1 import EnvironmentRef, TraceRead, TraceView

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")
CHUNK = 65536


def file(size: int, *extents: Extent) -> Inode:
    return Inode(stat.S_IFREG | 0o644, size=size, extents=list(extents))


def part(label: str, digest: str, size: int, **files: Inode) -> Part:
    root = Inode(stat.S_IFDIR | 0o755, children={n.encode(): f for n, f in files.items()})
    return Part(label, Tree(root, [Device(digest, size)]))


def view(parts: list[Part], *spans: ReadSpan, digests: tuple[str, ...] = (A, B, C)) -> TraceView:
    recording = Recording(
        recording="r", digests=list(digests), chunk_bytes=CHUNK, started_at=1.0, spans=list(spans)
    )
    return trace_view(EnvironmentRef(image="i"), "task", 5.0, parts, recording)


def test_bytes_by_part_and_over_time() -> None:
    parts = [part("image", A, 10 * CHUNK + 4096), part("toolkit t", B, 4 * CHUNK)]
    got = view(parts, ReadSpan(30, 1, 0, 2), ReadSpan(10, 0, 1, 1), ReadSpan(20, 0, 10, 1))
    assert got.reads == [
        TraceRead(10, 0, CHUNK, CHUNK),
        TraceRead(20, 0, 10 * CHUNK, 4096),  # the last chunk is shorter
        TraceRead(30, 1, 0, 2 * CHUNK),
    ]
    assert [(p.layer, p.size_bytes, p.read_bytes) for p in got.parts] == [
        ("image", 10 * CHUNK + 4096, CHUNK + 4096),
        ("toolkit t", 4 * CHUNK, 2 * CHUNK),
    ]
    assert (got.total_bytes, got.read_bytes) == (14 * CHUNK + 4096, 3 * CHUNK + 4096)
    assert (got.trace, got.recorded_at) == ("task", 5.0)


def test_files_by_their_extents() -> None:
    parts = [
        part(
            "image",
            A,
            4 * CHUNK,
            whole=file(CHUNK, Extent(0, 16, 16)),
            tail=file(5000, Extent(0, 32, 2)),
            split=file(3 * CHUNK, Extent(0, 0, 16), Extent(HOLE, 0, 16), Extent(0, 16, 16)),
            unread=file(CHUNK, Extent(0, 48, 16)),
            empty=file(0),
        )
    ]
    got = view(parts, ReadSpan(0, 0, 1, 2))
    assert [(f.path, f.size_bytes, f.read_bytes) for f in got.files] == [
        ("/split", 3 * CHUNK, CHUNK),
        ("/whole", CHUNK, CHUNK),
        ("/tail", 5000, 5000),
    ]


def test_files_are_those_seen_from_above() -> None:
    low = part("image", A, CHUNK, f=file(4096, Extent(0, 0, 1)), g=file(4096, Extent(0, 1, 1)))
    high = part("workspace w", B, CHUNK, f=file(8192, Extent(0, 0, 2)))
    got = view([low, high], ReadSpan(0, 0, 0, 1), ReadSpan(0, 1, 0, 1))
    assert [(f.path, f.layer, f.read_bytes) for f in got.files] == [
        ("/f", "workspace w", 8192),
        ("/g", "image", 4096),
    ]


def test_hard_links_and_shared_devices_count_once() -> None:
    one = file(4096, Extent(0, 0, 1))
    parts = [part("image", A, CHUNK, b=one, a=one), part("toolkit t", A, CHUNK)]
    got = view(parts, ReadSpan(0, 0, 0, 1))
    assert [f.path for f in got.files] == ["/a"]
    assert [(p.layer, p.read_bytes) for p in got.parts] == [("image", CHUNK)]


def test_what_the_environment_no_longer_has_is_left_out() -> None:
    parts = [part("image", B, CHUNK)]
    spans = [ReadSpan(0, 0, 0, 1), ReadSpan(0, 9, 0, 1), ReadSpan(0, 1, 7, 1), ReadSpan(1, 1, 0, 1)]
    got = view(parts, *spans)
    assert got.reads == [TraceRead(1, 0, 0, CHUNK)]


def test_the_most_read_files_are_kept_and_names_escaped() -> None:
    size = (MAX_FILES + 1) * 2 * 4096 // CHUNK * CHUNK + CHUNK
    root = Inode(stat.S_IFDIR)
    for number in range(MAX_FILES + 1):
        name = b"\xff\n" if number == 7 else b"%03d" % number
        blocks = 2 if number == 7 else 1
        root.children[name] = file(blocks * 4096, Extent(0, number * 2, blocks))
    got = view([Part("image", Tree(root, [Device(A, size)]))], ReadSpan(0, 0, 0, size // CHUNK))
    assert len(got.files) == MAX_FILES
    assert got.files[0].path == r"/\xff\x0a"


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=20),
    st.integers(0, 90),
    st.integers(0, 90),
)
def test_ranges_are_sets_of_bytes(spans: list[tuple[int, int]], first: int, last: int) -> None:
    read = {byte for offset, length in spans for byte in range(offset, offset + length)}
    ranges = Ranges(TraceRead(0, 0, offset, length) for offset, length in spans)
    start, end = sorted((first, last))
    assert ranges.total == len(read)
    assert ranges.within(start, end) == len(read & set(range(start, end)))


def test_sums_are_of_all_reads_also_of_those_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_READS", 2)
    got = view([part("image", A, 8 * CHUNK)], *(ReadSpan(9 - n, 0, n, 1) for n in range(5)))
    assert [read.at_ms for read in got.reads] == [5, 6]
    assert got.read_bytes == 5 * CHUNK
