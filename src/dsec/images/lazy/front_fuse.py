"""Shows devices as files of a small FUSE file system: the front for every host.

The keeper has mounted it and answered the kernel's greeting; this is the rest of the conversation.
It fails closed: with the last descriptor gone, every read is EIO. Nothing is remembered that a
successor would need: numbers of files follow from their names, file handles are all 0, and what
was asked and not answered is asked again.

No file of the mount may be touched by the process that serves it: it would wait for itself.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from dsec.base.errors import Conflict, DsecError, InternalError, InvalidRequest
from dsec.images.lazy.interface import Reader
from dsec.images.lazy.quiet import QuietLog
from dsec.linux import fuse
from dsec.linux.fuse import Attributes, Opcode, Request

logger = logging.getLogger("dsec.filler")

_VALID_S = 24 * 3600
"""A number's size never changes, so its attributes may be kept; a name is asked for each time."""
_BURST = 64
"""Requests taken in a row; then others on the loop have a turn."""
_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class _File:
    node: int
    name: bytes
    reader: Reader

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.node, self.reader.size_bytes)


_DIRECTORY = Attributes(fuse.ROOT, 0, directory=True)


def node_of(name: str, size_bytes: int) -> int:
    """The number of a file: the same in every process that shows this name with this size."""
    text = f"{size_bytes} {name}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    return number | 1 << 62  # never 0 or the root's


async def _end() -> None:
    raise InternalError("the mount of data is gone: somebody else has unmounted it")


class FuseFront:
    """Serves one mount; see `Front`."""

    name = "fuse"

    def __init__(self, descriptor: int, mount_point: Path, generation: int) -> None:
        """Take over a mounted connection.

        Args:
            descriptor: of the connection, not blocking; stays the caller's.
            mount_point: where it is mounted.
            generation: how many processes served it before.
        """
        self._descriptor = descriptor
        self._mount_point = mount_point
        self._generation = generation
        self._by_name: dict[bytes, _File] = {}
        self._by_node: dict[int, _File] = {}
        self._waiting: dict[int, anyio.CancelScope] = {}
        self._log = QuietLog(logger)
        self._answers: dict[int, Callable[[Request], None]] = {
            Opcode.LOOKUP: self._look_up,
            Opcode.FORGET: self._ignore,
            Opcode.BATCH_FORGET: self._ignore,
            Opcode.GETATTR: self._get_attributes,
            Opcode.OPEN: self._open,
            Opcode.OPENDIR: self._open_directory,
            Opcode.READDIR: self._read_directory,
            Opcode.STATFS: self._describe_volume,
            Opcode.RELEASE: self._agree,
            Opcode.RELEASEDIR: self._agree,
            Opcode.FLUSH: self._agree,
            Opcode.DESTROY: self._agree,
            Opcode.INTERRUPT: self._interrupt,
        }

    async def expose(self, name: str, reader: Reader) -> Path:
        """Show a device as a file of this name.

        Raises:
            InvalidRequest: it cannot be a file's name.
            Conflict: two names have the same number; this one cannot be shown now.
        """
        encoded = os.fsencode(name)
        if not encoded or len(encoded) > _NAME_BYTES or name in (".", "..") or "/" in name:
            raise InvalidRequest(f"{name[:100]!r} cannot be a file's name")
        node = node_of(name, reader.size_bytes)
        if self._by_node.get(node, _File(node, encoded, reader)).name != encoded:
            raise Conflict(f"{name} and another device have the same number")
        await self.withdraw(name)
        self._by_name[encoded] = self._by_node[node] = _File(node, encoded, reader)
        return self._mount_point / name

    async def withdraw(self, name: str) -> None:
        """Show it no more."""
        file = self._by_name.pop(os.fsencode(name), None)
        if file is not None:
            del self._by_node[file.node]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer the kernel; expose what was exposed before first.

        Requests unanswered at the end are left to the next process.

        Raises:
            InternalError: (in a group) somebody else has unmounted it.
        """
        loop = asyncio.get_running_loop()
        if self._generation > 0:
            fuse.ask_again(self._descriptor)
        async with anyio.create_task_group() as tasks:
            loop.add_reader(self._descriptor, self._take, tasks)
            try:
                yield
            finally:
                loop.remove_reader(self._descriptor)
                tasks.cancel_scope.cancel()

    def _take(self, tasks: TaskGroup) -> None:
        """Answer what is there: at once if it can be, else by a task."""
        try:
            for _ in range(_BURST):
                request = fuse.read_request(self._descriptor)
                if request is None:
                    return
                self._dispatch(request, tasks)
        except fuse.Unmounted:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            tasks.start_soon(_end)

    def _dispatch(self, request: Request, tasks: TaskGroup) -> None:
        try:
            if request.opcode == Opcode.READ:
                self._read(request, tasks)
            else:
                self._answers.get(request.opcode, self._refuse)(request)
        except Exception:  # noqa: BLE001 - a reader waits, and the loop goes on
            self._log.exception("a request failed")
            self._fail(request, errno.EIO)

    def _read(self, request: Request, tasks: TaskGroup) -> None:
        file = self._by_node.get(request.node)
        if file is None:
            self._fail(request, errno.EIO)
            return
        offset, length = request.span
        data = file.reader.read_now(offset, length)
        if data is None:
            tasks.start_soon(self._fetch, request, file)
        else:
            fuse.answer(self._descriptor, request.unique, data)

    async def _fetch(self, request: Request, file: _File) -> None:
        with anyio.CancelScope() as scope:
            self._waiting[request.unique] = scope
            try:
                await self._fetch_and_answer(request, file)
            finally:
                del self._waiting[request.unique]

    async def _fetch_and_answer(self, request: Request, file: _File) -> None:
        try:
            data = await file.reader.read(*request.span)
        except (DsecError, OSError) as error:
            self._log.warning("%s: a read failed: %s", os.fsdecode(file.name), error)
            self._fail(request, errno.EIO)
        except Exception:  # noqa: BLE001 - a reader waits
            self._log.exception("a read failed")
            self._fail(request, errno.EIO)
        else:
            if self._by_node.get(file.node) is file:
                fuse.answer(self._descriptor, request.unique, data)
            else:
                self._fail(request, errno.EIO)  # withdrawn meanwhile

    def _interrupt(self, request: Request) -> None:
        """The reader has a signal: it waits for any answer now, even to be killed."""
        scope = self._waiting.get(request.interrupted)
        if scope is not None:
            scope.cancel()
            fuse.answer_error(self._descriptor, request.interrupted, errno.EINTR)

    def _look_up(self, request: Request) -> None:
        file = self._by_name.get(request.text)
        if request.node != fuse.ROOT or file is None:
            self._fail(request, errno.ENOENT)
        else:
            self._answer(request, fuse.entry_body(file.attributes, _VALID_S))

    def _get_attributes(self, request: Request) -> None:
        if request.node == fuse.ROOT:
            self._answer(request, fuse.attributes_body(_DIRECTORY, _VALID_S))
        elif file := self._by_node.get(request.node):
            self._answer(request, fuse.attributes_body(file.attributes, _VALID_S))
        else:
            self._fail(request, errno.ESTALE)

    def _open(self, request: Request) -> None:
        if request.node in self._by_node:
            self._answer(request, fuse.open_body(fuse.OPEN_DIRECT_IO | fuse.OPEN_NO_FLUSH))
        else:
            self._fail(request, errno.ESTALE)  # the kernel looks the name up again

    def _open_directory(self, request: Request) -> None:
        self._answer(request, fuse.open_body(0))

    def _read_directory(self, request: Request) -> None:
        dots = [(fuse.ROOT, b".", True), (fuse.ROOT, b"..", True)]
        files = [(file.node, file.name, False) for file in self._by_name.values()]
        self._answer(request, fuse.directory_body(dots + files, *request.span))

    def _describe_volume(self, request: Request) -> None:
        self._answer(request, fuse.statfs_body())

    def _agree(self, request: Request) -> None:
        self._answer(request, b"")

    def _refuse(self, request: Request) -> None:
        self._fail(request, errno.ENOSYS)

    def _ignore(self, request: Request) -> None:
        """It wants no answer."""

    def _answer(self, request: Request, body: bytes) -> None:
        fuse.answer(self._descriptor, request.unique, body)

    def _fail(self, request: Request, number: int) -> None:
        fuse.answer_error(self._descriptor, request.unique, number)
