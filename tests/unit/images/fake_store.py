"""A store in memory that fails, hangs and interrupts as it is told."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, DsecError, NotFound, Unavailable, Unsupported
from dsec.images.store.interface import BlobRef, DocumentKind, FoundBlob, nothing

Before = Callable[[str, str], Awaitable[None]]


class AnyClock:
    """The clock of whatever runs the test: under Trio's MockClock it jumps."""

    def now(self) -> float:
        return 1.8e9 + anyio.current_time()

    def monotonic(self) -> float:
        return anyio.current_time()


@dataclass
class SetClock:
    """A clock that stands still until it is moved."""

    time: float = 1.8e9

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def let(_call: str, _about: str) -> None:
    """Let every call through."""


@dataclass
class FakeStore:
    """A `BlobStore`. Calls are told to `before`, which may fail, wait, or do something meanwhile."""

    clock: Clock = field(default_factory=AnyClock)
    url: str = "fake://store"
    lists: bool = True
    """Whether it lists and deletes blobs."""
    deletes: bool = True
    """Whether documents may be deleted."""
    before: Before = let
    calls: Counter[str] = field(default_factory=Counter)
    blobs: dict[str, bytes] = field(default_factory=dict)
    put_at: dict[str, float] = field(default_factory=dict)
    documents: dict[tuple[DocumentKind, str], bytes] = field(default_factory=dict)

    def fail(self, error: DsecError | None = None) -> None:
        """From now on nothing is answered."""

        async def refuse(_call: str, _about: str) -> None:
            raise error or Unavailable("gone")

        self.before = refuse

    def hang(self) -> None:
        """From now on every call waits for ever."""

        async def wait(_call: str, _about: str) -> None:
            await anyio.sleep_forever()

        self.before = wait

    def heal(self) -> None:
        self.before = let

    def names(self, kind: DocumentKind) -> list[str]:
        return sorted(name for of, name in self.documents if of == kind)

    def add(self, data: bytes, age_s: float = 0.0) -> BlobRef:
        """Have a blob."""
        digest = digest_of(data)
        self.blobs[digest] = data
        self.put_at[digest] = self.clock.now() - age_s
        return BlobRef(digest, len(data))

    async def _call(self, call: str, about: str) -> None:
        self.calls[call] += 1
        await anyio.lowlevel.checkpoint()
        await self.before(call, about)

    async def put_blob(
        self, file: Path, digest: str, on_progress: Callable[[int], None] = nothing
    ) -> None:
        await self._call("put_blob", digest)
        data = await anyio.Path(file).read_bytes()
        assert digest_of(data) == digest
        self.add(data)
        on_progress(len(data))

    async def has_blob(self, digest: str) -> bool:
        await self._call("has_blob", digest)
        return digest in self.blobs

    async def read_blob(self, digest: str, offset: int, length: int) -> bytes:
        await self._call("read_blob", digest)
        if digest not in self.blobs:
            raise NotFound(f"no blob {digest}", kind="blob")
        return self.blobs[digest][offset : offset + length]

    async def list_blobs(self) -> AsyncIterator[FoundBlob]:
        await self._call("list_blobs", "")
        if not self.lists:
            raise Unsupported("it lists no blobs")
        for digest, data in list(self.blobs.items()):
            yield FoundBlob(digest, len(data), self.put_at[digest])

    async def delete_blob(self, digest: str) -> None:
        await self._call("delete_blob", digest)
        self.blobs.pop(digest, None)

    async def put_document(
        self,
        kind: DocumentKind,
        name: str,
        body: bytes,
        blobs: Sequence[BlobRef],
        *,
        absent: bool = False,
    ) -> None:
        await self._call("put_document", f"{kind} {name}")
        for ref in blobs:
            assert ref.digest in self.blobs, f"{kind} {name} names {ref.digest}"
        if absent and self.documents.get((kind, name), body) != body:
            raise Conflict(f"{kind} {name} is there")
        self.documents[kind, name] = body

    async def get_document(self, kind: DocumentKind, name: str) -> bytes:
        await self._call("get_document", f"{kind} {name}")
        if (kind, name) not in self.documents:
            raise NotFound(f"no {kind} {name}", kind="document")
        return self.documents[kind, name]

    async def list_documents(self, kind: DocumentKind) -> AsyncIterator[str]:
        await self._call("list_documents", kind)
        for name in self.names(kind):
            yield name

    async def delete_document(self, kind: DocumentKind, name: str) -> None:
        await self._call("delete_document", f"{kind} {name}")
        if not self.deletes:
            raise Unsupported("documents stay")
        self.documents.pop((kind, name), None)

    def blob_path(self, digest: str) -> Path | None:
        del digest
        return None

    async def aclose(self) -> None:
        pass
