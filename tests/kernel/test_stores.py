"""One suite for every kind of store: a directory, S3 and an OCI registry, by their URLs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import get_args

import anyio
import pytest

from dsec.base.clock import SystemClock
from dsec.base.errors import (
    Conflict,
    DsecError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    Unavailable,
    Unsupported,
)
from dsec.images.collecting import FRESH_BLOB_S, Use, collect
from dsec.images.records import DataRecord, LayerRecord, Packed, StoredLayer, encode
from dsec.images.store.interface import MAX_DOCUMENT_BYTES, BlobRef, BlobStore, DocumentKind
from dsec.images.store.opening import open_store
from dsec.images.store.options import StoreOptions
from dsec.images.stored import refs_of
from tests.kernel.stores import BUCKET, S3_KEY, S3_SECRET, registry_server, s3_server

pytestmark = [pytest.mark.anyio]

OPTIONS = StoreOptions(timeout_s=20, pause_s=0.01, part_bytes=5 << 20)
LARGE = os.urandom(1 << 20) * 12 + b"an odd end"
NAMES = [
    "debian:12",
    "a/b/../c d%2F",
    ".",
    "..",
    "=x",
    "umlaut-ü-☃",
    'new\nline\t"quoted" \\',
    "x" * 512,
    "ü" * 256,
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["directory", "s3", "registry"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A URL with {} for what makes a store a fresh one."""
    place = tmp_path_factory.mktemp(request.param)
    match request.param:
        case "directory":
            yield f"file://{place}/{{}}"
        case "s3":
            with s3_server(place, request.node.nodeid) as address:
                yield f"s3://{BUCKET}/{{}}?endpoint=http://{address}&region=eu-1&path_style=true"
        case _:
            with registry_server(place) as address:
                yield f"oci+http://{address}/team/{{}}"


@pytest.fixture
async def store(base: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BlobStore]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_SECRET)
    opened = open_store(base.format(uuid.uuid4().hex), OPTIONS)
    yield opened
    await opened.aclose()


@pytest.fixture
def listing(store: BlobStore) -> bool:
    """Whether the store lists and deletes blobs; what does not says so."""
    return not store.url.startswith("oci")


def ref(data: bytes) -> BlobRef:
    return BlobRef(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))


async def put(store: BlobStore, data: bytes, place: Path) -> BlobRef:
    file = place / uuid.uuid4().hex
    file.write_bytes(data)
    await store.put_blob(file, ref(data).digest)
    return ref(data)


async def test_its_url_opens_it_again(store: BlobStore, tmp_path: Path) -> None:
    blob = await put(store, b"content", tmp_path)
    again = open_store(store.url, OPTIONS)
    try:
        assert again.url == store.url
        assert await again.read_blob(blob.digest, 0, 7) == b"content"
    finally:
        await again.aclose()


@pytest.mark.parametrize("data", [b"", b"x", b"small" * 1000, LARGE], ids=["0", "1", "5k", "12M"])
async def test_a_blob_comes_back(store: BlobStore, tmp_path: Path, data: bytes) -> None:
    blob = await put(store, data, tmp_path)
    assert await store.has_blob(blob.digest)
    assert await store.read_blob(blob.digest, 0, len(data)) == data
    if (path := store.blob_path(blob.digest)) is not None:
        assert path.read_bytes() == data


async def test_ranges(store: BlobStore, tmp_path: Path) -> None:
    blob = await put(store, LARGE, tmp_path)
    for offset, length in [(0, 1), (1, 4096), (5 << 20, 1 << 20), (len(LARGE) - 1, 1), (7, 0)]:
        assert await store.read_blob(blob.digest, offset, length) == LARGE[offset : offset + length]


@pytest.mark.parametrize("offset", [-1, 0, 5], ids=["across", "at", "beyond"])
async def test_a_range_beyond_the_end_is_no_short_answer(
    store: BlobStore, tmp_path: Path, offset: int
) -> None:
    blob = await put(store, b"0123456789", tmp_path)
    with pytest.raises(Unavailable):
        await store.read_blob(blob.digest, 10 + offset, 4)


async def test_many_reads_at_once(store: BlobStore, tmp_path: Path) -> None:
    blob = await put(store, LARGE, tmp_path)

    async def read(offset: int) -> None:
        data = await store.read_blob(blob.digest, offset, 65536)
        assert data == LARGE[offset : offset + 65536]

    async with anyio.create_task_group() as tasks:
        for offset in range(0, 64 * 65536, 65536):
            tasks.start_soon(read, offset + 3)


async def test_a_blob_that_is_not_there(store: BlobStore) -> None:
    digest = ref(b"nothing").digest
    assert not await store.has_blob(digest)
    for length in (0, 1):
        with pytest.raises(NotFound) as caught:
            await store.read_blob(digest, 0, length)
        assert caught.value.details["kind"] == "blob"


async def test_putting_again_changes_nothing(store: BlobStore, tmp_path: Path) -> None:
    blob = await put(store, b"content", tmp_path)
    await put(store, b"content", tmp_path)
    assert await store.read_blob(blob.digest, 0, 7) == b"content"


@pytest.mark.parametrize("data", [b"", b"another", LARGE], ids=["0", "7", "12M"])
async def test_a_file_that_is_not_what_its_digest_says(
    store: BlobStore, tmp_path: Path, data: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(InvalidRequest):
        await store.put_blob(file, ref(b"content").digest)
    assert not await store.has_blob(ref(b"content").digest)


@pytest.mark.parametrize("digest", ["", "sha256:ab", "../../etc", "sha256:" + "A" * 64])
async def test_what_is_no_digest(store: BlobStore, tmp_path: Path, digest: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InvalidRequest):
        await store.put_blob(tmp_path / "file", digest)
    with pytest.raises(InvalidRequest):
        await store.has_blob(digest)
    with pytest.raises(InvalidRequest):
        await store.read_blob(digest, 0, 1)


async def test_progress_ends_with_the_size(store: BlobStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(LARGE)
    told: list[int] = []
    await store.put_blob(file, ref(LARGE).digest, told.append)
    assert told == sorted(told)
    assert len(set(told)) > 2
    assert told[-1] == len(LARGE)


async def test_an_interrupted_upload_leaves_no_blob(store: BlobStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(LARGE)
    digest = ref(LARGE).digest

    with anyio.CancelScope() as scope:

        def stop(done: int) -> None:
            if done:
                scope.cancel()

        await store.put_blob(file, digest, stop)
    assert scope.cancelled_caught
    assert not await store.has_blob(digest)
    await store.put_blob(file, digest)
    assert await store.read_blob(digest, 0, len(LARGE)) == LARGE


async def test_two_who_put_the_same(store: BlobStore, tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(put, store, LARGE, tmp_path)
    assert await store.read_blob(ref(LARGE).digest, 0, len(LARGE)) == LARGE


async def test_listing_and_deleting_blobs(store: BlobStore, tmp_path: Path, listing: bool) -> None:
    data = [b"one", b"two!", b""]
    blobs = [await put(store, each, tmp_path) for each in data]
    if not listing:
        with pytest.raises(Unsupported):
            [found async for found in store.list_blobs()]
        with pytest.raises(Unsupported):
            await store.delete_blob(blobs[0].digest)
        return
    found = [each async for each in store.list_blobs()]
    assert sorted((f.digest, f.size_bytes) for f in found) == sorted(
        (b.digest, b.size_bytes) for b in blobs
    )
    now = SystemClock().now()
    assert all(abs(each.modified_at - now) < 3600 for each in found)
    await store.delete_blob(blobs[0].digest)
    await store.delete_blob(blobs[0].digest)
    assert not await store.has_blob(blobs[0].digest)
    assert len([each async for each in store.list_blobs()]) == 2


async def test_an_empty_store(store: BlobStore, listing: bool) -> None:
    for kind in get_args(DocumentKind):
        assert [name async for name in store.list_documents(kind)] == []
    if listing:
        assert [blob async for blob in store.list_blobs()] == []
    with pytest.raises(NotFound) as caught:
        await store.get_document("image", "none")
    assert caught.value.details["kind"] == "document"
    await store.delete_document("image", "none")


async def test_documents_of_any_name(store: BlobStore) -> None:
    for name in NAMES:
        await store.put_document("image", name, f'{{"is":{len(name)}}}\n'.encode(), [])
    for name in NAMES:
        assert await store.get_document("image", name) == f'{{"is":{len(name)}}}\n'.encode()
    assert sorted([name async for name in store.list_documents("image")]) == sorted(NAMES)
    assert [name async for name in store.list_documents("layer")] == []


@pytest.mark.parametrize("name", ["", "x" * 513, "ü" * 257, "\udc80"])
async def test_names_that_are_refused(store: BlobStore, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await store.put_document("image", name, b"{}", [])
    with pytest.raises(InvalidRequest):
        await store.get_document("image", name)


async def test_a_document_is_replaced_and_deleted(store: BlobStore, tmp_path: Path) -> None:
    blob = await put(store, b"data", tmp_path)
    for body in (b'{"a":1}', b"", b'{"a":2}', b'{"a":1}'):
        await store.put_document("layer", "one", body, [blob, blob])
        assert await store.get_document("layer", "one") == body
    assert [name async for name in store.list_documents("layer")] == ["one"]
    await store.put_document("trace", "one", b"another kind", [])
    await store.delete_document("layer", "one")
    await store.delete_document("layer", "one")
    assert [name async for name in store.list_documents("layer")] == []
    with pytest.raises(NotFound):
        await store.get_document("layer", "one")
    assert await store.get_document("trace", "one") == b"another kind"
    await store.put_document("layer", "one", b'{"a":1}', [blob])
    assert await store.get_document("layer", "one") == b'{"a":1}'


async def test_a_document_that_replaces_none(store: BlobStore) -> None:
    await store.put_document("toolkit", "lint:v1", b"one", [], absent=True)
    await store.put_document("toolkit", "lint:v1", b"one", [], absent=True)
    with pytest.raises(Conflict):
        await store.put_document("toolkit", "lint:v1", b"two", [], absent=True)
    assert await store.get_document("toolkit", "lint:v1") == b"one"
    await store.put_document("toolkit", "lint:v2", b"two", [], absent=True)
    await store.delete_document("toolkit", "lint:v1")
    await store.put_document("toolkit", "lint:v1", b"three", [], absent=True)
    assert await store.get_document("toolkit", "lint:v1") == b"three"


async def test_one_of_many_is_first(store: BlobStore) -> None:
    if not store.url.startswith("file"):
        return  # the servers of these tests look and then write, with nothing in between
    won: list[bytes] = []

    async def put(body: bytes) -> None:
        with contextlib.suppress(Conflict):
            await store.put_document("toolkit", "lint:v1", body, [], absent=True)
            won.append(body)

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(put, f"content {number}".encode())
    assert won == [await store.get_document("toolkit", "lint:v1")]


async def test_the_largest_document(store: BlobStore) -> None:
    body = os.urandom(1 << 20) * (MAX_DOCUMENT_BYTES >> 20)
    await store.put_document("trace", "large", body, [])
    assert await store.get_document("trace", "large") == body
    with pytest.raises(PayloadTooLarge):
        await store.put_document("trace", "larger", body + b"x", [])


async def test_many_documents(store: BlobStore) -> None:
    names = {f"toolkit-{number}:1.0" for number in range(40)}

    async def write(name: str) -> None:
        await store.put_document("toolkit", name, name.encode(), [])

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(write, name)
    assert {name async for name in store.list_documents("toolkit")} == names


class LaterClock:
    """A clock two hours ahead: what was put just now is old enough to go."""

    def now(self) -> float:
        return SystemClock().now() + 2 * FRESH_BLOB_S

    def monotonic(self) -> float:
        return SystemClock().monotonic()


async def put_layer(store: BlobStore, layer: str, place: Path) -> StoredLayer:
    """A layer of one device with blobs of its own."""
    raw, meta, packed, table = [
        await put(store, f"{what} of {layer}".encode().ljust(size)[:size], place)
        for what, size in (("raw", 4096), ("meta", 100), ("pack", 90), ("table", 36))
    ]
    lies = Packed(pack=packed, table=table, chunk_bytes=65536)
    record = LayerRecord(
        digest=layer, source="test", created_at=1.0, meta=meta, devices=[raw.digest]
    )
    data = DataRecord(digest=raw.digest, size_bytes=4096, packed=lies)
    stored = StoredLayer(layer=record, meta=meta, data=[data])
    await store.put_document("layer", layer, encode(stored), refs_of(stored))
    return stored


async def test_what_nobody_needs_is_collected(
    store: BlobStore, tmp_path: Path, listing: bool
) -> None:
    used, idle = (ref(name).digest for name in (b"used layer", b"idle layer"))
    kept, gone = [await put_layer(store, layer, tmp_path) for layer in (used, idle)]
    use = Use(node="n1", at=LaterClock().now(), layers=[used])
    await store.put_document("use", "n1", encode(use), [])
    fresh = await collect(store, SystemClock(), dry_run=True)
    assert fresh.blobs == 0
    report = await collect(store, LaterClock(), dry_run=False)
    assert [name async for name in store.list_documents("layer")] == [used]
    assert [name async for name in store.list_documents("intent")] == []
    assert all([await store.has_blob(blob.digest) for blob in refs_of(kept)])
    left = [await store.has_blob(blob.digest) for blob in refs_of(gone)]
    assert left == [not listing] * 3
    assert report.blobs == (3 + 2 if listing else 0)  # the raw data of both is named by no document


async def test_every_error_is_one_of_ours(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises((DsecError, OSError)):
        await store.put_blob(tmp_path / "missing", ref(b"x").digest)


async def test_nobody_there(base: str, tmp_path: Path) -> None:
    url = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:1", base)
    if base.startswith("file"):
        url = f"file://{tmp_path}/not-mounted/{{}}"
    nobody = open_store(url.format("x"), StoreOptions(pause_s=0.001))
    try:
        with pytest.raises(Unavailable):
            await nobody.has_blob(ref(b"x").digest)
        with pytest.raises(Unavailable):
            await nobody.read_blob(ref(b"x").digest, 0, 1)
        with pytest.raises(Unavailable):
            await nobody.put_document("image", "x", b"{}", [])
        with pytest.raises(Unavailable):
            [name async for name in nobody.list_documents("image")]
    finally:
        await nobody.aclose()
