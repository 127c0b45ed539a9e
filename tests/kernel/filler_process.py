"""A reader over a slow store in memory, and a keeper whose worker serves such readers.

`python filler_process.py keeper [--background] CONFIG`: the real keeper, a worker from here.
`config.store` is a directory; each file in it is shown under its name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.abc

from dsec.base.errors import DataUnavailable
from dsec.images.lazy import keeper
from dsec.images.lazy.config import FillerConfig, load_config
from dsec.images.lazy.fronts import open_front
from dsec.images.lazy.handed import Handed
from dsec.images.lazy.pulse import beat
from dsec.kit import log
from dsec.kit.blocking import in_thread

CHUNK = 65536


class SlowReader:
    """A device whose chunks come late, or not, as `before_chunk` has it."""

    def __init__(self, content: bytes, cache: Path) -> None:
        self.content = content
        self.cache_fd = os.open(cache, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self.cache_fd).st_size != len(content):
            # Not where a mark may be already: the kernel would ask this very thread about it.
            os.ftruncate(self.cache_fd, len(content))
        self.here: set[int] = set()
        self.fetches = 0
        self.hits = 0
        self.failing = False
        self.missing: Callable[[int], bool] = lambda _chunk: False
        self.waiting = 0
        self.released = anyio.Event()
        self.delay_s = 0.0

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def close(self) -> None:
        os.close(self.cache_fd)

    def read_now(self, offset: int, length: int) -> bytes | None:
        return os.pread(self.cache_fd, length, offset) if self.is_here(offset, length) else None

    def is_here(self, offset: int, length: int) -> bool:
        here = self._chunks(offset, length) <= self.here
        self.hits += here
        return here

    async def read(self, offset: int, length: int) -> bytes:
        await self.ensure(offset, length)
        return os.pread(self.cache_fd, length, offset)

    async def ensure(self, offset: int, length: int) -> None:
        for chunk in sorted(self._chunks(offset, length) - self.here):
            await self._fetch(chunk)

    async def _fetch(self, chunk: int) -> None:
        if self.failing:
            raise DataUnavailable("the store is dead")
        if self.missing(chunk):
            self.waiting += 1
            await self.released.wait()
        await anyio.sleep(self.delay_s)
        start = chunk * CHUNK
        data = self.content[start : start + CHUNK]
        await in_thread("disk", os.pwrite, self.cache_fd, data, start)
        self.fetches += 1
        self.here.add(chunk)

    def _chunks(self, offset: int, length: int) -> set[int]:
        end = min(offset + length, len(self.content))
        return set(range(offset // CHUNK, -(-end // CHUNK)))


async def serve(config: FillerConfig) -> None:
    """A worker: all of the store's files, and 200 to whoever asks for the status."""
    store, cache = Path(config.store), Path(config.cache)
    files = await in_thread("disk", lambda: sorted(store.iterdir()))
    with open_front(config) as front:
        for file in files:
            reader = SlowReader(file.read_bytes(), cache / file.name)
            reader.delay_s = float(config.store_options.get("delay_s", "0"))
            reader.missing = partial(_note_fetch, cache)
            await front.expose(file.name, reader)
        config.socket.unlink(missing_ok=True)
        async with (
            front.serving(),
            anyio.create_task_group() as group,
            await anyio.create_unix_listener(config.socket) as listener,
        ):
            group.start_soon(beat, Handed.decode(os.environ).pulse)
            await listener.serve(_answer)


def fetch_note(cache: Path, pid: int) -> Path:
    """A file that is there once this worker has begun to fetch for somebody."""
    return cache / f"fetching-{pid}"


def _note_fetch(cache: Path, _chunk: int) -> bool:
    fetch_note(cache, os.getpid()).touch()
    return False


async def _answer(connection: anyio.abc.SocketStream) -> None:
    async with connection:
        await connection.receive()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


def main() -> int:
    role, *arguments = sys.argv[1:]
    worker = (sys.executable, str(Path(__file__).resolve()), "worker")
    if role == "keeper":
        return keeper.main(arguments, worker)
    config = load_config(Path(arguments[0]))
    if status := config.store_options.get("exit"):
        return int(status)
    log.configure()
    anyio.run(serve, config, backend_options={"use_uvloop": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
