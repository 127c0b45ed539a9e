"""Trajectories of ended sandboxes on their way to the shared store, and back.

One is sent when its sandbox is over, as one compressed blob and a document under the sandbox's id
that names it; what could not be sent is tried again. From there any node can tell it, also when the
one the sandbox ran on is gone. All of it is best effort: what is never sent is on its node, for as
long as the ending is remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import zstandard

from dsec.base.clock import Clock
from dsec.base.errors import DataUnavailable, DsecError, Unavailable
from dsec.images.records import KeptTrajectory
from dsec.images.store.interface import BlobRef, BlobStore
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.edge.shipping")

TOGETHER_S = 1.0
"""What ends within it is sent in one go; whoever waited for an end has its answer by then."""
RETRY_S = 60.0
PIECE_BYTES = 8 << 20
MAX_BLOB_BYTES = 512 << 20
MAX_BYTES = 4 << 30
"""Of one unpacked, on disk."""
SENT = ".sent"
"""Of the mark beside one that is in the store."""


class Shipping:
    """Of one node."""

    def __init__(self, store: BlobStore, kept: Path, clock: Clock) -> None:
        """Send what is in the directory `kept`."""
        self._store = store
        self._kept = kept
        self._clock = clock
        self._wanted = anyio.Event()

    def wake(self) -> None:
        """There is one to send."""
        self._wanted.set()

    async def run(self) -> None:
        """Send what there is, and what comes, for ever."""
        while True:
            left = await self._send_quietly()
            with anyio.move_on_after(RETRY_S if left else None):
                await self._wanted.wait()
            self._wanted = anyio.Event()
            await anyio.sleep(TOGETHER_S)

    async def _send_quietly(self) -> int:
        try:
            return await self._send_all()
        except Exception:  # nothing here is worth the edge's end
            logger.exception("nothing could be sent")
            return 1

    async def _send_all(self) -> int:
        """How many could not be sent."""
        left = 0
        for path in await in_thread("disk", unsent, self._kept):
            try:
                await self._send(path)
            except FileNotFoundError:
                continue  # forgotten meanwhile
            except (DsecError, OSError) as exc:
                left += 1
                logger.warning("not sent", extra={"sandbox_id": path.name, "error": str(exc)})
            except Exception:  # the others may go all the same
                left += 1
                logger.exception("not sent", extra={"sandbox_id": path.name})
        return left

    async def _send(self, path: Path) -> None:
        packed = path.with_name(f".{path.name}.zst")
        try:
            ref = await in_thread("pack", _pack, path, packed)
            await self._store.put_blob(packed, ref.digest)
            record = KeptTrajectory(sandbox=path.name, blob=ref, kept_at=self._clock.now())
            body = msgspec.json.encode(record)
            await self._store.put_document("trajectory", path.name, body, [ref])
            await in_thread("disk", _mark, path)
        finally:
            packed.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def fetched(self, sandbox: str) -> AsyncIterator[Path]:
        """One from the store, as a file for as long as it is read.

        Raises:
            NotFound: the store has none. Unavailable, DataUnavailable.
        """
        body = await self._store.get_document("trajectory", sandbox)
        record = msgspec.json.decode(body, type=KeptTrajectory)
        path = self._kept / f".fetched-{sandbox}-{secrets.token_hex(8)}"
        packed = path.with_name(f"{path.name}.zst")
        try:
            await self._fetch(record.blob, packed)
            await in_thread("pack", _unpack, packed, path)
            yield path
        finally:
            packed.unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    async def _fetch(self, ref: BlobRef, packed: Path) -> None:
        if ref.size_bytes > MAX_BLOB_BYTES:
            raise DataUnavailable(f"a trajectory of {ref.size_bytes} bytes")
        digest, got = hashlib.sha256(), 0
        while got < ref.size_bytes:
            size = min(PIECE_BYTES, ref.size_bytes - got)
            data = await self._store.read_blob(ref.digest, got, size)
            if not data:
                break
            await in_thread("pack", _add, packed, data, digest)
            got += len(data)
        if f"sha256:{digest.hexdigest()}" != ref.digest:
            raise DataUnavailable("the store gives other bytes than were put there")


def unsent(kept: Path) -> list[Path]:
    """Those that are not in the store yet. Blocks."""
    names = {path.name for path in kept.iterdir()}
    mine = sorted(name for name in names if "." not in name and name + SENT not in names)
    return [kept / name for name in mine]


def forget(kept: Path, sandbox: str) -> None:
    """Remove one. Blocks."""
    (kept / sandbox).unlink(missing_ok=True)
    (kept / (sandbox + SENT)).unlink(missing_ok=True)


def _mark(path: Path) -> None:
    if path.exists():
        path.with_name(path.name + SENT).touch()


def _pack(path: Path, packed: Path) -> BlobRef:
    digest = hashlib.sha256()
    with path.open("rb") as source, packed.open("wb") as target:
        zstandard.ZstdCompressor().copy_stream(source, target)
    with packed.open("rb") as written:
        while piece := written.read(PIECE_BYTES):
            digest.update(piece)
    return BlobRef(f"sha256:{digest.hexdigest()}", packed.stat().st_size)


def _add(packed: Path, data: bytes, digest: hashlib._Hash) -> None:
    digest.update(data)
    with packed.open("ab") as file:
        file.write(data)


def _unpack(packed: Path, path: Path) -> None:
    reader = zstandard.ZstdDecompressor().stream_reader
    left = MAX_BYTES
    try:
        with path.open("wb") as target, packed.open("rb") as source, reader(source) as whole:
            while piece := whole.read(PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    raise DataUnavailable(f"a trajectory of over {MAX_BYTES} bytes")
                target.write(piece)
    except zstandard.ZstdError as exc:
        raise Unavailable(f"a trajectory cannot be unpacked: {exc}") from exc
