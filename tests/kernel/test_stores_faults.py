"""Stores whose network or server misbehaves: never a wrong answer, never a hang."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from dsec.base.errors import DsecError, NotFound, PermissionDenied, StorageFull, Unavailable
from dsec.images.store.interface import BlobStore
from dsec.images.store.opening import open_store
from dsec.images.store.options import StoreOptions
from tests.kernel.faulty import Fault, Proxy, proxy
from tests.kernel.stores import BUCKET, S3_KEY, S3_SECRET, registry_server, s3_server

pytestmark = [pytest.mark.anyio]

PATIENT = StoreOptions(timeout_s=30, pause_s=0.01, part_bytes=5 << 20)
HASTY = StoreOptions(
    timeout_s=1.5, upload_timeout_s=1.5, pause_s=0.01, attempts=2, part_bytes=5 << 20
)
"""For what is meant to time out; nothing else has to be so quick."""
LARGE = os.urandom(1 << 20) * 12
LARGE_DIGEST = f"sha256:{hashlib.sha256(LARGE).hexdigest()}"
SMALL = os.urandom(1000)
SMALL_DIGEST = f"sha256:{hashlib.sha256(SMALL).hexdigest()}"
LIMIT_S = 20.0
"""Far above what the options allow; a hang would be found here."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["s3", "registry"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The URL's form, with {} for host and port, and the real server's."""
    place = tmp_path_factory.mktemp(request.param)
    if request.param == "s3":
        with s3_server(place, request.node.nodeid) as address:
            yield f"s3://{BUCKET}/here?endpoint=http://{{}}", address
    else:
        with registry_server(place) as address:
            yield "oci+http://{}/team/here", address


@pytest.fixture
async def between(
    server: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Proxy]:
    """A proxy in front of a server that has SMALL."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_SECRET)
    async with proxy(server[1]) as made:
        yield made


@pytest.fixture
async def patient(
    server: tuple[str, str], between: Proxy, tmp_path: Path
) -> AsyncIterator[BlobStore]:
    store = open_store(server[0].format(between.address), PATIENT)
    (tmp_path / "small").write_bytes(SMALL)
    (tmp_path / "large").write_bytes(LARGE)
    await store.put_blob(tmp_path / "small", SMALL_DIGEST)
    yield store
    await store.aclose()


@pytest.fixture
async def hasty(
    server: tuple[str, str], between: Proxy, patient: BlobStore
) -> AsyncIterator[BlobStore]:
    store = open_store(server[0].format(between.address), HASTY)
    yield store
    await store.aclose()


async def read(store: BlobStore) -> bytes:
    with anyio.fail_after(LIMIT_S):
        return await store.read_blob(SMALL_DIGEST, 100, 500)


@pytest.mark.parametrize("fault", ["500", "cut", "truncate", "too-much"])
async def test_a_passing_fault_is_not_noticed(
    between: Proxy, patient: BlobStore, fault: Fault
) -> None:
    between.misbehave(fault, times=2)
    assert await read(patient) == SMALL[100:600]
    assert between.faults == 2


@pytest.mark.parametrize("fault", ["hang", "drip"])
async def test_a_passing_hang_is_not_noticed(
    between: Proxy, hasty: BlobStore, fault: Fault
) -> None:
    between.misbehave(fault, times=1)
    assert await read(hasty) == SMALL[100:600]
    assert between.faults == 1


@pytest.mark.parametrize("fault", ["500", "cut", "truncate", "too-much", "hang", "drip"])
async def test_a_lasting_fault_is_unavailable_and_passes(
    between: Proxy, hasty: BlobStore, patient: BlobStore, fault: Fault
) -> None:
    between.misbehave(fault)
    with pytest.raises(Unavailable):
        await read(hasty)
    assert between.faults >= HASTY.attempts  # a kept connection that broke counts for none
    between.behave()
    assert await read(patient) == SMALL[100:600]


async def test_a_flipped_bit_passes_unverified(between: Proxy, patient: BlobStore) -> None:
    between.misbehave("flip")
    assert await read(patient) == bytes([SMALL[100] ^ 1]) + SMALL[101:600]


async def test_a_flipped_bit_in_a_document_does_not(between: Proxy, patient: BlobStore) -> None:
    await patient.put_document("image", "x", b'{"a":1}', [])
    between.misbehave("flip")
    with pytest.raises(Unavailable):
        await patient.get_document("image", "x")


async def test_forbidden(between: Proxy, patient: BlobStore) -> None:
    between.misbehave("403")
    with pytest.raises(PermissionDenied):
        await read(patient)
    assert between.faults == 1


@pytest.mark.parametrize("fault", ["500", "hang", "cut"])
async def test_whether_it_is_there_is_not_answered_wrongly(
    between: Proxy, hasty: BlobStore, fault: Fault
) -> None:
    between.misbehave(fault, "HEAD")
    with anyio.fail_after(LIMIT_S), pytest.raises(Unavailable):
        await hasty.has_blob(SMALL_DIGEST)


async def test_connections_are_used_again(between: Proxy, patient: BlobStore) -> None:
    await read(patient)
    between.peers.clear()
    before = between.requests
    for _ in range(20):
        await read(patient)
    assert between.requests == before + 20
    assert len(between.peers) == 1


def sending(store: BlobStore) -> str:
    """The method that carries a part."""
    return "PATCH" if store.url.startswith("oci") else "PUT"


@pytest.mark.parametrize("fault", ["500", "cut", "truncate"])
async def test_an_upload_survives_the_loss_of_a_part(
    between: Proxy, patient: BlobStore, tmp_path: Path, fault: Fault
) -> None:
    between.misbehave(fault, sending(patient), times=1, after=1)
    digest = await put_fresh(patient, tmp_path)
    assert between.faults == 1
    assert await patient.has_blob(digest)


@pytest.mark.parametrize("fault", ["500", "hang", "cut"])
async def test_a_broken_upload_leaves_nothing_and_can_be_repeated(
    between: Proxy, hasty: BlobStore, patient: BlobStore, tmp_path: Path, fault: Fault
) -> None:
    data = fresh()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    (tmp_path / "fresh").write_bytes(data)
    between.misbehave(fault, sending(hasty), after=1)
    with anyio.fail_after(LIMIT_S), pytest.raises(Unavailable):
        await hasty.put_blob(tmp_path / "fresh", digest)
    between.behave()
    assert not await patient.has_blob(digest)
    await patient.put_blob(tmp_path / "fresh", digest)
    assert await patient.read_blob(digest, 0, len(data)) == data


async def test_where_a_repeated_upload_goes_on(
    between: Proxy, patient: BlobStore, tmp_path: Path
) -> None:
    data = fresh()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    (tmp_path / "fresh").write_bytes(data)
    between.misbehave("500", sending(patient), after=2)
    with pytest.raises(Unavailable):
        await patient.put_blob(tmp_path / "fresh", digest)
    between.behave()
    told: list[int] = []
    await patient.put_blob(tmp_path / "fresh", digest, told.append)
    # A registry says what it has; the library for S3 begins anew.
    assert told[0] == (10 << 20 if sending(patient) == "PATCH" else 0)
    assert told[-1] == len(data)
    assert await patient.read_blob(digest, 0, len(data)) == data


async def test_a_full_server(between: Proxy, patient: BlobStore, tmp_path: Path) -> None:
    between.misbehave("507", sending(patient))
    with pytest.raises(StorageFull):
        await put_fresh(patient, tmp_path)


async def test_a_server_that_is_gone_and_comes_back(
    server: tuple[str, str], between: Proxy, patient: BlobStore
) -> None:
    between.misbehave("cut")
    for _ in range(3):
        with pytest.raises(DsecError) as caught:
            await read(patient)
        assert caught.value.retryable
    between.behave()
    assert await read(patient) == SMALL[100:600]
    with pytest.raises(NotFound):
        await patient.read_blob(LARGE_DIGEST, 0, 1)


async def test_cancelled_reads_leave_the_store_usable(between: Proxy, patient: BlobStore) -> None:
    between.misbehave("hang", times=20)
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(read, patient)
        while between.faults < 20:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert await read(patient) == SMALL[100:600]


async def test_no_secret_in_what_is_said(between: Proxy, patient: BlobStore) -> None:
    between.misbehave("403")
    with pytest.raises(PermissionDenied) as caught:
        await read(patient)
    for secret in (S3_SECRET, "Signature", "Authorization"):
        assert secret not in caught.value.message
        assert secret not in patient.url


def fresh() -> bytes:
    """12 MiB nobody has stored."""
    return os.urandom(1 << 20) * 12


async def put_fresh(store: BlobStore, place: Path) -> str:
    data = fresh()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    (place / "fresh").write_bytes(data)
    with anyio.fail_after(LIMIT_S * 3):
        await store.put_blob(place / "fresh", digest)
    return digest
