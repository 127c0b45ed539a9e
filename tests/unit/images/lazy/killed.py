"""A filler in a process of its own that dies by SIGKILL at a step that was chosen before.

`python killed.py CONFIG STEP`, with requests to open in `<run>/requests.json`. A step is a write
of chunks (half of them, then the whole), a mark, an unmark, or a hole. Exits 0 if it came to the
end of its reading before.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import anyio
import msgspec

from dsec.base.clock import SystemClock
from dsec.images.lazy.cache import CachedData
from dsec.images.lazy.chunkmap import ChunkMap
from dsec.images.lazy.config import load_config
from dsec.images.lazy.filler import open_filler
from dsec.images.lazy.interface import Reader
from dsec.images.store.opening import open_store
from dsec.wire.filler import OpenData
from tests.unit.images.lazy.bench import FakeFront


class Steps:
    """Counts down, and kills before a step and after it."""

    def __init__(self, left: int) -> None:
        self._left = left
        write, punch = CachedData.write, CachedData.punch
        mark, unmark = ChunkMap.mark, ChunkMap.unmark

        def halving(files: CachedData, chunk: int, data: bytes) -> None:
            self.step()
            write(files, chunk, data[: len(data) // 2])
            self.step()
            write(files, chunk, data)

        def punching(files: CachedData, first: int, end: int) -> int:
            self.step()
            freed = punch(files, first, end)
            self.step()
            return freed

        def marking(chunks: ChunkMap, first: int, end: int) -> None:
            self.step()
            mark(chunks, first, end)
            self.step()

        def unmarking(chunks: ChunkMap, first: int, end: int) -> None:
            self.step()
            unmark(chunks, first, end)

        for kind, name, act in [
            (CachedData, "write", halving),
            (CachedData, "punch", punching),
            (ChunkMap, "mark", marking),
            (ChunkMap, "unmark", unmarking),
        ]:
            setattr(kind, name, act)

    def step(self) -> None:
        self._left -= 1
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def main(config_file: Path, seed: int) -> None:
    config, front = load_config(config_file), FakeFront()
    file = anyio.Path(config.run) / "requests.json"
    requests = msgspec.json.decode(await file.read_bytes(), type=list[OpenData])
    async with open_filler(config, open_store(config.store), front, SystemClock()) as filler:
        for each in requests:
            await filler.open(each)
        async with anyio.create_task_group() as group:
            for reader in front.readers.values():
                for nth in range(4):
                    group.start_soon(read_all, reader, random.Random(seed + nth))


async def read_all(reader: Reader, dice: random.Random) -> None:
    offsets = list(range(0, reader.size_bytes, 8192))
    dice.shuffle(offsets)
    for offset in offsets:
        if reader.read_now(offset, 8192) is None:
            await reader.read(offset, 8192)


if __name__ == "__main__":
    step = int(sys.argv[2])
    Steps(step)
    anyio.run(main, Path(sys.argv[1]), step)
