"""Trajectories of ended sandboxes on their way to the shared store, and back.

One is sent when its sandbox is over, as one compressed blob and a document under the sandbox's id
that names it and the project; what could not be sent is tried again. From there any node can tell
it, also when the one the sandbox ran on is gone. All of it is best effort: what is never sent is on
its node, for as long as the ending is remembered.

Who is trusted: a node believes a document's project, and so does the control plane, but only as far
as the blob says the same (`parcel`). Whoever may write the store can therefore make up a record, and
give away one they can read there anyway; a document alone, forged, mixed up or damaged, opens
nothing to another project. Sandboxes never reach the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import msgspec

from dsec.base.clock import Clock
from dsec.base.errors import DataUnavailable, DsecError, StorageFull
from dsec.edge import parcel
from dsec.edge.parcel import Label
from dsec.edge.seats import Seats
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
FETCHED_AT_ONCE = 4
FETCHED_BY_ONE_PROJECT = 2
"""That may lie here while they are read."""
SENT = ".sent"
"""Of the mark beside one that is in the store."""


class Shipping:
    """Of one node."""

    def __init__(
        self,
        store: BlobStore,
        kept: Path,
        project_of: Callable[[str], str | None],
        clock: Clock,
    ) -> None:
        """Send what is in the directory `kept`.

        Args:
            store: where to.
            kept: trajectories by the ids of their sandboxes.
            project_of: of a sandbox that is over; None while, or when, it is not known.
            clock: what time it is.
        """
        self._store = store
        self._kept = kept
        self._project_of = project_of
        self._clock = clock
        self._seats = Seats(
            "reading trajectories from the store", FETCHED_AT_ONCE, FETCHED_BY_ONE_PROJECT
        )
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
        project = self._project_of(path.name)
        if not project:
            return  # just over, and it will be told of; or just forgotten
        packed = path.with_name(f".{path.name}.zst")
        try:
            label = Label(sandbox=path.name, project=project)
            ref, size = await in_thread("pack", parcel.pack, path, packed, label)
            await self._store.put_blob(packed, ref.digest)
            await self._put_document(label, ref, size)
            await in_thread("disk", _mark, path)
        finally:
            await _removed(packed)

    async def _put_document(self, label: Label, ref: BlobRef, size: int) -> None:
        record = KeptTrajectory(
            sandbox=label.sandbox,
            project=label.project,
            blob=ref,
            size_bytes=size,
            kept_at=self._clock.now(),
        )
        body = msgspec.json.encode(record)
        await self._store.put_document("trajectory", label.sandbox, body, [ref])

    async def look(self, sandbox: str) -> KeptTrajectory:
        """What the store says of one.

        Raises:
            NotFound: the store has none. Unavailable: it does not answer.
            DataUnavailable: its document makes no sense, or is another's.
        """
        body = await self._store.get_document("trajectory", sandbox)
        try:
            record = msgspec.json.decode(body, type=KeptTrajectory)
        except msgspec.MsgspecError as exc:
            raise _odd(sandbox, str(exc)) from exc
        if record.sandbox != sandbox or not record.project:
            raise _odd(sandbox, "it does not say whose it is")
        return record

    @contextlib.asynccontextmanager
    async def fetched(self, sandbox: str, project: str = "") -> AsyncIterator[Path]:
        """One from the store, as a file for as long as it is read.

        Args:
            sandbox: whose.
            project: that it must belong to; empty: the one the document names.

        Raises:
            NotFound: the store has none. Unavailable: it does not answer.
            DataUnavailable: what it has is damaged, too large, or another project's.
            RateLimited: too many are being read. StorageFull: no room for it.
        """
        record = await self.look(sandbox)
        if project not in ("", record.project):
            raise _odd(sandbox, "it names another project")
        path = self._kept / f".fetched-{sandbox}-{secrets.token_hex(8)}"
        packed = path.with_name(f"{path.name}.zst")
        with self._seats.seat(record.project):
            try:
                await in_thread("disk", check_room, self._kept, record)
                await self._fetch(record.blob, packed)
                label = Label(sandbox=sandbox, project=record.project)
                await in_thread("pack", parcel.unpack, packed, path, label, record.size_bytes)
                await _removed(packed)
                yield path
            finally:
                await _removed(packed, path)

    async def _fetch(self, ref: BlobRef, packed: Path) -> None:
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


def check_room(kept: Path, record: KeptTrajectory) -> None:
    """See that one may be fetched. Blocks.

    Raises:
        DataUnavailable: it is larger than any may be.
        StorageFull: with its blob it would take more than half of what is free.
    """
    blob, size = record.blob.size_bytes, record.size_bytes
    if not (0 <= blob <= MAX_BLOB_BYTES and 0 <= size <= MAX_BYTES):
        raise DataUnavailable(f"the record of {record.sandbox} would take {size} bytes")
    if blob + size > shutil.disk_usage(kept).free // 2:
        raise StorageFull(
            f"the node has no room to read the record of {record.sandbox}, {size >> 20} MiB",
            needed_bytes=blob + size,
        )


def forget(kept: Path, sandbox: str) -> None:
    """Remove one. Blocks."""
    (kept / sandbox).unlink(missing_ok=True)
    (kept / (sandbox + SENT)).unlink(missing_ok=True)


def _mark(path: Path) -> None:
    if path.exists():
        path.with_name(path.name + SENT).touch()


def _add(packed: Path, data: bytes, digest: hashlib._Hash) -> None:
    digest.update(data)
    with packed.open("ab") as file:
        file.write(data)


def _odd(sandbox: str, why: str) -> DataUnavailable:
    return DataUnavailable(f"the store's document about {sandbox} cannot be used: {why}")


async def _removed(*paths: Path) -> None:
    """Remove files, also when called off: a large one takes a while, so never on the loop."""
    with anyio.CancelScope(shield=True):
        await in_thread("disk", _remove, paths)


def _remove(paths: tuple[Path, ...]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
