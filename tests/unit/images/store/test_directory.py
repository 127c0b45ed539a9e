from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from dsec.base.errors import DsecError, PermissionDenied, StorageFull, Unavailable
from dsec.images.store import directory
from dsec.images.store.directory import DirectoryStore
from dsec.images.store.layout import blob_key, document_key
from dsec.images.store.options import StoreOptions

pytestmark = [pytest.mark.anyio]

DATA = b"content" * 1000
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


class FixedClock:
    def __init__(self, now: float) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def test_files_lie_where_the_pages_say(tmp_path: Path) -> None:
    digits = DIGEST.removeprefix("sha256:")
    assert blob_key(DIGEST) == f"blobs/sha256/{digits[:2]}/{digits}"
    assert document_key("image", "debian:12") == "documents/image/debian%3A12.json"


async def test_only_root_looks_in(store: DirectoryStore, file: Path, tmp_path: Path) -> None:
    await store.put_blob(file, DIGEST)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EACCES, PermissionDenied),
        (errno.EROFS, PermissionDenied),
        (errno.EIO, Unavailable),
        (errno.ESTALE, Unavailable),
    ],
)
async def test_what_the_file_system_says(
    store: DirectoryStore,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[DsecError],
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory, "_append", fail)
    with pytest.raises(error) as caught:
        await store.put_blob(file, DIGEST)
    assert type(caught.value) is error
    assert not await store.has_blob(DIGEST)
    assert list((file.parent / "store/incoming").iterdir()) == []


async def test_what_a_crash_left_is_swept_after_a_day(file: Path, tmp_path: Path) -> None:
    await DirectoryStore(tmp_path / "store").put_document("image", "x", b"", [])
    left = tmp_path / "store/incoming/left"
    left.touch()
    age = left.stat().st_mtime
    await DirectoryStore(tmp_path / "store", clock=FixedClock(age + 3600)).put_blob(file, DIGEST)
    assert left.exists()
    await DirectoryStore(tmp_path / "store", clock=FixedClock(age + 90000)).put_document(
        "image", "x", b"", []
    )
    assert not left.exists()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system that hangs until the event is set."""
    released = threading.Event()

    def hang(*_: Any) -> bytes:
        released.wait(60)
        return b""

    monkeypatch.setattr(directory, "_pread", hang)
    yield released
    released.set()


async def test_a_hanging_file_system_is_given_up(tmp_path: Path, stuck: threading.Event) -> None:
    store = DirectoryStore(tmp_path, StoreOptions(timeout_s=0.01))
    with pytest.raises(Unavailable, match="no answer"):
        await store.read_blob(DIGEST, 0, 1)


async def test_it_does_not_take_ever_more_threads(tmp_path: Path, stuck: threading.Event) -> None:
    store = DirectoryStore(tmp_path, StoreOptions(timeout_s=0.05))
    said: list[str] = []

    async def read() -> None:
        with pytest.raises(Unavailable) as caught:
            await store.read_blob(DIGEST, 0, 1)
        said.append(caught.value.message)

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(read)
    while "does not answer" not in said[-1]:
        await read()
    assert store._running <= 2 * 16
    stuck.set()
    while store._running:
        await anyio.lowlevel.checkpoint()
    with pytest.raises(Unavailable, match="ends before"):
        await store.read_blob(DIGEST, 0, 1)


async def test_an_unmounted_share_is_not_an_empty_store(tmp_path: Path, file: Path) -> None:
    store = DirectoryStore(tmp_path / "mount/dsec/store")
    calls = [
        store.has_blob(DIGEST),
        store.put_blob(file, DIGEST),
        store.delete_blob(DIGEST),
        store.get_document("image", "x"),
        store.delete_document("image", "x"),
    ]
    for call in calls:
        with pytest.raises(Unavailable, match="mounted"):
            await call
    assert not (tmp_path / "mount").exists()


async def test_what_is_not_ours_is_not_listed(store: DirectoryStore, file: Path) -> None:
    await store.put_blob(file, DIGEST)
    await store.put_document("image", "x", b"", [])
    root = file.parent / "store"
    (root / blob_key(DIGEST)).with_name("x.tmp").touch()
    (root / "documents/image/readme.txt").touch()
    assert [found.digest async for found in store.list_blobs()] == [DIGEST]
    assert [name async for name in store.list_documents("image")] == ["x"]


async def test_a_damaged_document_is_not_given_out(store: DirectoryStore, tmp_path: Path) -> None:
    await store.put_document("image", "x", b"body", [])
    path = tmp_path / "store" / document_key("image", "x")
    path.write_bytes(path.read_bytes()[:-1] + b"Y")
    with pytest.raises(Unavailable, match="damaged"):
        await store.get_document("image", "x")
