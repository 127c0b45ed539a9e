"""Archives that stream in: kept in a file until the job that wants them takes it over."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from pathlib import Path
from typing import BinaryIO, TypeVar

import anyio

from dsec.base.errors import InvalidRequest, PayloadTooLarge
from dsec.images import disk
from dsec.images.importer import file_digest
from dsec.images.jobs import Job, Jobs
from dsec.kit.blocking import in_thread
from dsec.wire.public_v1 import ImageProgress

_STEP_BYTES = 8 << 20
MAX_UPLOAD_BYTES = 160 << 30
"""Somewhat more than the files of a layer may have."""
T = TypeVar("T")
E = TypeVar("E")


class Uploads:
    """The archives on their way in."""

    def __init__(self, tmp: Path, jobs: Jobs) -> None:
        self._tmp = tmp
        self._jobs = jobs

    async def watch(
        self,
        archive: AsyncIterator[bytes],
        key: Callable[[str], Hashable],
        work: Callable[[Job[T], Path, str], Awaitable[T]],
        ready: Callable[[T], E],
    ) -> AsyncGenerator[ImageProgress | E, None]:
        """Receive an archive, then do the work on it, or join the same work under way.

        Args:
            archive: its bytes.
            key: of the work, given the archive's digest.
            work: given the job, the file (its to take) and the digest.
            ready: makes the last event of what came of it.

        Raises:
            InvalidRequest: the archive is empty.
            StorageFull: no room.
            DsecError: what the work failed of.
        """
        directory = self._tmp / f"upload-{uuid.uuid4().hex}"
        upload = directory / "archive"
        taken = False
        try:
            await in_thread("disk", lambda: directory.mkdir(mode=0o700))
            async with contextlib.aclosing(_receive(archive, upload)) as received:
                async for done in received:
                    yield ImageProgress(step="receiving", done=done)
            digest = await in_thread("build", file_digest, upload)

            async def owning(job: Job[T]) -> T:
                try:
                    return await work(job, upload, digest)
                finally:
                    await _remove(directory)

            # The job may outlive this caller, others having joined: then the file is the job's.
            taken = not self._jobs.running(key(digest))
            watched = self._jobs.watch(key(digest), owning, ready)
            async with contextlib.aclosing(watched) as events:
                async for event in events:
                    yield event
        finally:
            if not taken:
                await _remove(directory)


async def _remove(directory: Path) -> None:
    with anyio.CancelScope(shield=True):
        await in_thread("disk", disk.remove_tree, directory)


async def _receive(archive: AsyncIterator[bytes], path: Path) -> AsyncGenerator[int, None]:
    """Write a stream to a file, in worker threads; yields the bytes so far now and then."""
    done = told = 0
    with disk.full_disk_named(path.parent):
        file = await in_thread("disk", lambda: path.open("xb"))
        try:
            async for chunk in archive:
                await in_thread("disk", _write, file, chunk)
                done += len(chunk)
                if done > MAX_UPLOAD_BYTES:
                    raise PayloadTooLarge(f"the archive has over {MAX_UPLOAD_BYTES >> 30} GiB")
                if done - told >= _STEP_BYTES:
                    told = done
                    yield done
            await in_thread("disk", file.truncate, done)
        finally:
            with anyio.CancelScope(shield=True):
                await in_thread("disk", file.close)
    if not done:
        raise InvalidRequest("the archive is empty")
    yield done


def _write(file: BinaryIO, chunk: bytes) -> None:
    """Zeros are skipped: a sandbox's sparse file must not become as large here as it says it is."""
    if chunk.count(0) == len(chunk):
        file.seek(len(chunk), os.SEEK_CUR)
    else:
        file.write(chunk)
