"""A filler for tests: a store that can be told to fail, a front that is a dictionary."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import zstandard

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, NotFound, Unsupported
from dsec.images.lazy.config import FillerConfig
from dsec.images.lazy.filler import Filler, open_filler
from dsec.images.lazy.interface import Reader
from dsec.wire.filler import OpenData

CHUNK = 4096
GROUP = 4 * CHUNK


class AnyClock:
    """The clock of whatever runs the test: under Trio's MockClock it jumps."""

    def now(self) -> float:
        return 1.8e9 + anyio.current_time()

    def monotonic(self) -> float:
        return anyio.current_time()


@dataclass
class Sample:
    """A device and how it is packed."""

    content: bytes
    chunk_bytes: int = CHUNK
    pack: bytes = b""
    table: bytes = b""
    spans: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        packer, stored = zstandard.ZstdCompressor(level=1), []
        for start in range(0, len(self.content), self.chunk_bytes):
            raw = self.content[start : start + self.chunk_bytes]
            stored.append(packer.compress(raw) if raw.strip(b"\0") else b"")
        self.pack = b"".join(stored)
        self.table = b"".join(
            struct.pack("<I32s", len(each), hashlib.sha256(each).digest()) for each in stored
        )
        starts = accumulate((len(each) for each in stored), initial=0)
        self.spans = [(start, len(each)) for start, each in zip(starts, stored, strict=False)]

    @property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def pack_digest(self) -> str:
        return digest_of(self.pack)

    def request(self, directory: Path) -> OpenData:
        table = directory / f"{self.digest[7:20]}.table"
        table.write_bytes(self.table)
        return OpenData(
            digest=self.digest,
            size_bytes=len(self.content),
            chunk_bytes=self.chunk_bytes,
            pack=self.pack_digest,
            pack_bytes=len(self.pack),
            table=str(table),
        )


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def sample(
    chunks: int, seed: int = 0, zeros: tuple[int, ...] = (), chunk_bytes: int = CHUNK
) -> Sample:
    """Random content, so that stored chunks are about as long as the chunks."""
    dice = random.Random(seed)
    parts = [
        bytes(chunk_bytes) if i in zeros else dice.randbytes(chunk_bytes) for i in range(chunks)
    ]
    return Sample(b"".join(parts), chunk_bytes)


class FakeStore:
    url = "fake://store"

    def __init__(self, *samples: Sample) -> None:
        self.blobs = {each.pack_digest: each.pack for each in samples}
        self.requests: list[tuple[int, int]] = []
        self.answered = 0
        self.delay_s = 0.0
        self.fails: DsecError | Exception | None = None
        self.fails_at: set[int] = set()
        """Offsets of ranges that fail; empty = all."""
        self.hangs = False
        self.short_by = 0
        self.flipped: set[int] = set()
        """Offsets of bytes that come wrong."""
        self.flips_left = 1 << 30
        self.gate: anyio.Event | None = None
        self.at_once = 0
        self.most_at_once = 0

    async def read_blob(self, digest: str, offset: int, length: int) -> bytes:
        self.requests.append((offset, length))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await anyio.lowlevel.checkpoint()
            if self.gate is not None:
                await self.gate.wait()
            if self.hangs:
                await anyio.sleep_forever()
            await anyio.sleep(self.delay_s)
            return self._answer(digest, offset, length)
        finally:
            self.at_once -= 1

    def _answer(self, digest: str, offset: int, length: int) -> bytes:
        if self.fails is not None and (not self.fails_at or offset in self.fails_at):
            raise self.fails
        if digest not in self.blobs:
            raise NotFound(f"no blob {digest}", kind="blob")
        body = bytearray(self.blobs[digest][offset : offset + length - self.short_by])
        for place in self.flipped:
            if offset <= place < offset + length and self.flips_left:
                body[place - offset] ^= 1
                self.flips_left -= 1
        self.answered += 1
        return bytes(body)

    async def aclose(self) -> None:
        pass


class FakeFront:
    def __init__(self, name: str = "fuse") -> None:
        self.name = name
        self.readers: dict[str, Reader] = {}
        self.refuses = ""
        """Part of a name that cannot be shown."""

    async def expose(self, name: str, reader: Reader) -> Path:
        if self.refuses and self.refuses in name:
            raise Unsupported(f"cannot show {name}")
        self.readers[name] = reader
        return Path("/shown") / name

    async def withdraw(self, name: str) -> None:
        self.readers.pop(name, None)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield


class Bench:
    def __init__(self, directory: Path, *samples: Sample, **settings: Any) -> None:
        self.directory = directory
        self.samples = samples
        self.store = FakeStore(*samples)
        self.front = FakeFront(settings.get("front", "fuse"))
        self.clock: Clock = AnyClock()
        given: dict[str, Any] = {
            "store": self.store.url,
            "cache": str(directory / "cache"),
            "run": str(directory / "run"),
            "window_bytes": GROUP,
            "gap_bytes": 0,
            "range_bytes": GROUP + CHUNK,
            **settings,
        }
        self.config = FillerConfig(**given)

    @asynccontextmanager
    async def running(self, *, opened: bool = True) -> AsyncIterator[Filler]:
        self.config.home.mkdir(parents=True, exist_ok=True)
        arguments: Any = (self.config, self.store, self.front, self.clock)
        async with open_filler(*arguments) as filler:
            if opened:
                for each in self.samples:
                    await filler.open(each.request(self.directory))
            yield filler

    def reader(self, sample: Sample | None = None, alias: str = "") -> Reader:
        digest = (sample or self.samples[0]).digest[7:]
        return self.front.readers[f"{digest}.{alias}" if alias else digest]


def chunk_of(sample: Sample, chunk: int, count: int = 1) -> bytes:
    return sample.content[chunk * sample.chunk_bytes : (chunk + count) * sample.chunk_bytes]


async def read_chunk(reader: Reader, chunk: int, count: int = 1, size: int = CHUNK) -> bytes:
    """As a front reads."""
    found = reader.read_now(chunk * size, count * size)
    return await reader.read(chunk * size, count * size) if found is None else found


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition. Its deadline only ends a test that hangs."""
    with anyio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - a test sees from outside
            await anyio.sleep(0.005)
