# Generated from ../_async by tools/unasync.py; do not edit.
"""Files of a sandbox."""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self, TypeVar

import msgspec
from typing_extensions import override

from dsec.base.errors import InternalError, InvalidRequest, NotFound, Unavailable
from dsec.sdk import _blocking, _tar
from dsec.sdk._answers import stream_error
from dsec.sdk._http import ConnectionFailed, QueryValue, Request
from dsec.sdk._sync.call import UPLOAD_S, Body, Caller, EventStream, Lines
from dsec.sdk._sync.transport import Response
from dsec.sdk.models import (
    FileInfo,
    PathLike,
    Progress,
    WatchEvent,
    file_info,
    remote_path,
    watch_event,
)
from dsec.wire.sandbox import FileInfo as WireFileInfo
from dsec.wire.sandbox import Heartbeat, StreamError, WatchStarted, WatchStreamEvent
from dsec.wire.sandbox import WatchEvent as WireWatchEvent

T = TypeVar("T")
Data = bytes | bytearray | memoryview | str | Path | Iterable[bytes]
OnProgress = Callable[[Progress], None]
BINARY = "application/octet-stream"
TAR = "application/x-tar"
_WATCH: msgspec.json.Decoder[WatchStreamEvent] = msgspec.json.Decoder(WatchStreamEvent)


class _Removed(msgspec.Struct):
    removed: int


class _Entries(msgspec.Struct):
    entries: int


class FileStream(EventStream[bytes]):
    """The bytes of a file as they come; a connection that breaks is made again at the same place."""

    def __init__(self, caller: Caller, path: str, query: dict[str, QueryValue]) -> None:
        self._caller = caller
        self._path = path
        self._query = query
        self._response: Response | None = None
        self._request: Request | None = None
        self._patience = caller.patience()
        self._version: tuple[str | None, str | None] | None = None
        self._done_bytes = 0
        self._ended = False

    @override
    def __next__(self) -> bytes:
        """The next bytes.

        Raises:
            Unavailable: the connection broke and the file changed meanwhile.
        """
        while not self._ended:
            request = self._next_request()
            try:
                data = self._receive(request)
            except ConnectionFailed as exc:
                self._detach()
                self._caller.lost(exc, request, self._patience)
                continue
            if data:
                self._patience.succeeded()
                self._done_bytes += len(data)
                return data
            self._ended = True
        self._detach()
        raise StopIteration

    def _next_request(self) -> Request:
        if self._request is None:
            query = dict(self._query)
            if self._done_bytes:
                offset, length = query.get("offset"), query.get("length")
                query["offset"] = (int(offset) if offset else 0) + self._done_bytes
                if length is not None:
                    query["length"] = int(length) - self._done_bytes
            self._request = self._caller.request("GET", self._path, query)
        return self._request

    def _receive(self, request: Request) -> bytes:
        if self._query.get("length") == self._done_bytes:
            return b""
        if self._response is None:
            self._response = self._caller.open(request, self._patience)
            headers = self._response.headers
            version = headers.get("x-file-mtime"), headers.get("x-file-size")
            if self._version not in {None, version}:
                self._ended = True
                self._detach()
                raise Unavailable(
                    "the connection was lost, and the file has changed since"
                )
            self._version = version
        return self._response.receive(self._patience.wait_s())

    def _detach(self) -> None:
        self._request = None
        response, self._response = self._response, None
        if response is not None:
            response.close()

    @override
    def close(self) -> None:
        """Let go of the connection."""
        self._ended = True
        self._detach()


class ResponseStream(EventStream[bytes]):
    """The bytes of an answer that cannot be taken up again in the middle."""

    def __init__(self, caller: Caller, request: Request) -> None:
        self._caller = caller
        self._request = request
        self._patience = caller.patience()
        self._response: Response | None = None
        self._ended = False

    @override
    def __next__(self) -> bytes:
        """The next bytes.

        Raises:
            Unavailable: the connection broke.
        """
        data = b"" if self._ended else self.receive()
        if not data:
            self.close()
            raise StopIteration
        return data

    def receive(self) -> bytes:
        """The next bytes, b"" at the end."""
        if self._response is None:
            self._response = self._caller.open(self._request, self._patience)
        try:
            return self._response.receive(self._patience.wait_s())
        except ConnectionFailed as exc:
            request = self._response.headers.get("x-request-id", "")
            self.close()
            raise Unavailable(_broken(exc, request), request_id=request) from exc

    @override
    def close(self) -> None:
        """Let go of the connection."""
        self._ended = True
        response, self._response = self._response, None
        if response is not None:
            response.close()


def _broken(exc: ConnectionFailed, request: str) -> str:
    where = f", the server's log of request {request}" if request else ""
    return f"the stream broke off: {exc}; the sandbox's trajectory{where} may say why"


class Watch(EventStream[WatchEvent]):
    """Changes below a directory, from when `with` has entered on.

    A connection that breaks is made again, and an event "overflow" says that some may be missing.
    """

    def __init__(self, caller: Caller, path: str, query: dict[str, QueryValue]) -> None:
        self._caller = caller
        self._request = caller.request("GET", path, query)
        self._patience = caller.patience()
        self._lines: Lines | None = None
        self._ended = False

    @override
    def __enter__(self) -> Self:
        """Returns when changes are being watched."""
        self._attach()
        return self

    @override
    def __next__(self) -> WatchEvent:
        """The next change."""
        while not self._ended:
            self._attach()
            event = self._event()
            if event is None:
                self._attach()
                return WatchEvent("", "overflow")
            if isinstance(event, WireWatchEvent):
                return watch_event(event)
        raise StopIteration

    def _attach(self) -> None:
        if self._lines is None:
            while not isinstance(self._event(), WatchStarted):
                pass

    def _event(self) -> WatchStreamEvent | None:
        """The next event; None: the connection broke."""
        try:
            line = self._line()
        except ConnectionFailed as exc:
            self._detach()
            self._caller.lost(exc, self._request, self._patience)
            return None
        try:
            event = _WATCH.decode(line)
        except msgspec.ValidationError:
            return Heartbeat()  # a kind of event this SDK is too old for
        if isinstance(event, StreamError):
            self.close()
            raise stream_error(event)
        return event

    def _line(self) -> bytes:
        if self._lines is None:
            response = self._caller.open(self._request, self._patience)
            self._lines = Lines(response, self._patience)
        line = self._lines.next()
        if not line:
            raise ConnectionFailed("the stream ended", sent=True)
        return line

    def _detach(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    @override
    def close(self) -> None:
        """Stop watching."""
        self._ended = True
        self._detach()


class Files:
    """Files of a sandbox; `sandbox.files`.

    Paths are absolute, or relative to the sandbox's working directory; `user` is on whose behalf,
    None: the sandbox's `init_user`. Names are `str`, bytes that are not UTF-8 as with `os.fsdecode`.
    """

    def __init__(self, caller: Caller, sandbox_path: str) -> None:
        self._caller = caller
        self._sandbox = sandbox_path
        self._path = f"{sandbox_path}/files"

    def read(
        self,
        path: PathLike,
        *,
        offset: int | None = None,
        length: int | None = None,
        user: str | None = None,
    ) -> bytes:
        """The bytes of a file, or `length` of them from `offset` on.

        Raises:
            NotFound: there is no such file.
            PermissionDenied: `user` may not read it.
        """
        stream = self.stream(path, offset=offset, length=length, user=user)
        with stream:
            return b"".join([data for data in stream])

    def read_text(
        self, path: PathLike, *, errors: str = "strict", user: str | None = None
    ) -> str:
        """A file as UTF-8 text; `errors` as in `bytes.decode`."""
        return (self.read(path, user=user)).decode("utf-8", errors)

    def stream(
        self,
        path: PathLike,
        *,
        offset: int | None = None,
        length: int | None = None,
        user: str | None = None,
    ) -> FileStream:
        """The bytes of a file as they come, to iterate over."""
        query: dict[str, QueryValue] = {
            "path": remote_path(path),
            "offset": offset,
            "length": length,
            "user": user,
        }
        return FileStream(self._caller, self._path, query)

    def write(  # noqa: PLR0913 - keywords
        self,
        path: PathLike,
        data: Data,
        *,
        mode: int | None = None,
        user: str | None = None,
        atomic: bool = True,
        parents: bool = False,
        append: bool = False,
    ) -> FileInfo:
        """Write a file.

        Args:
            path: where.
            data: the bytes; text; a local file (`pathlib.Path`); or an iterator of bytes. What can
                be read again is sent again after a lost connection; an iterator cannot.
            mode: permission bits; None: those it has, else 0o644.
            user: who shall own it.
            atomic: readers see the old file or the new one, never half of it.
            parents: make missing directories.
            append: add to the end.

        Raises:
            StorageFull: the disk is full; nothing partial was kept.
            Unavailable: the connection was lost, and `data` could not be sent again.
        """
        source = _Source(data)
        query: dict[str, QueryValue] = {
            "path": remote_path(path),
            "mode": None if mode is None else f"{mode:o}",
            "user": user,
            "atomic": None if atomic and not append else atomic and not append,
            "parents": parents or None,
            "append": append or None,
            "sha256": source.known_sha256(),
        }
        if source.whole is not None:
            request = self._caller.request(
                "PUT",
                self._path,
                query,
                source.whole,
                key=self._caller.new_key(),
                patience_s=UPLOAD_S,
            )
            info = self._caller.call(request, WireFileInfo)
        else:
            upload = self._caller.upload(
                "PUT",
                self._path,
                query,
                repeatable=source.again,
                kind=BINARY,
                key=self._caller.new_key(),
            )
            info = self._caller.send_body(upload, source.chunks, WireFileInfo)
        source.verify(info, append=append)
        return file_info(info)

    def stat(
        self, path: PathLike, *, follow: bool = True, user: str | None = None
    ) -> FileInfo:
        """What a path is; of a symbolic link, what it leads to, unless `follow` is False.

        Raises:
            NotFound: nothing is there.
        """
        query: dict[str, QueryValue] = {
            "path": remote_path(path),
            "follow": follow,
            "user": user,
        }
        request = self._caller.request("GET", f"{self._path}/stat", query)
        return file_info(self._caller.call(request, WireFileInfo))

    def exists(self, path: PathLike, *, user: str | None = None) -> bool:
        """Whether something is there, be it a symbolic link that leads nowhere."""
        try:
            self.stat(path, follow=False, user=user)
        except NotFound as exc:
            if exc.details.get("kind") == "sandbox":
                raise
            return False
        return True

    def list(
        self, path: PathLike, depth: int = 1, *, user: str | None = None
    ) -> builtins.list[FileInfo]:
        """What is in a directory, down to `depth` levels; links are not followed."""
        query: dict[str, QueryValue] = {
            "path": remote_path(path),
            "depth": depth,
            "user": user,
        }
        request = self._caller.request("GET", f"{self._path}/list", query)
        return [
            file_info(info)
            for info in self._caller.call(request, builtins.list[WireFileInfo])
        ]

    def mkdir(
        self,
        path: PathLike,
        *,
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
    ) -> FileInfo:
        """Make a directory; with `parents` missing ones above it too, and none is no error.

        Raises:
            Conflict: it exists already.
        """
        query: dict[str, QueryValue] = {
            "path": remote_path(path),
            "mode": None if mode is None else f"{mode:o}",
            "parents": parents or None,
            "user": user,
        }
        request = self._caller.request(
            "POST", f"{self._path}/mkdir", query, key=self._caller.new_key()
        )
        return file_info(self._caller.call(request, WireFileInfo))

    def move(
        self,
        path: PathLike,
        to: PathLike,
        *,
        overwrite: bool = False,
        user: str | None = None,
    ) -> FileInfo:
        """Rename a file or directory.

        Raises:
            Conflict: something is at `to` already, and `overwrite` is False.
        """
        query: dict[str, QueryValue] = {
            "path": remote_path(path),
            "to": remote_path(to),
            "overwrite": overwrite,
            "user": user,
        }
        request = self._caller.request(
            "POST", f"{self._path}/move", query, key=self._caller.new_key()
        )
        return file_info(self._caller.call(request, WireFileInfo))

    def remove(
        self, path: PathLike, *, recursive: bool = False, user: str | None = None
    ) -> int:
        """Remove a file, or with `recursive` a tree; how many files went.

        Raises:
            NotFound: nothing is there.
        """
        query: dict[str, QueryValue] = {
            "path": remote_path(path),
            "recursive": recursive or None,
            "user": user,
        }
        request = self._caller.request(
            "DELETE", self._path, query, key=self._caller.new_key(), patience_s=UPLOAD_S
        )
        return (self._caller.call(request, _Removed)).removed

    def watch(
        self, path: PathLike, *, recursive: bool = False, user: str | None = None
    ) -> Watch:
        """Watch a directory: `with files.watch(...) as events: for event in events`."""
        query: dict[str, QueryValue] = {
            "path": remote_path(path),
            "recursive": recursive or None,
            "user": user,
        }
        return Watch(self._caller, f"{self._path}/watch", query)

    def put_tar(
        self,
        path: PathLike,
        data: bytes | Iterable[bytes] | Path,
        *,
        user: str | None = None,
    ) -> int:
        """Unpack a tar stream below a directory, which is made; how many entries it had."""
        source = _Source(data)
        return self._put_tree(path, source.chunks, again=source.again, user=user)

    def _put_tree(
        self, path: PathLike, body: Body, *, again: bool, user: str | None
    ) -> int:
        query: dict[str, QueryValue] = {"path": remote_path(path), "user": user}
        request = self._caller.upload(
            "PUT",
            f"{self._sandbox}/tree",
            query,
            repeatable=again,
            kind=TAR,
            key=self._caller.new_key(),
        )
        return (self._caller.send_body(request, body, _Entries)).entries

    def get_tar(self, path: PathLike, *, user: str | None = None) -> ResponseStream:
        """A tree as a tar stream. The sandbox wrote it: unpack it with care, or `download_tree`."""
        query: dict[str, QueryValue] = {"path": remote_path(path), "user": user}
        return ResponseStream(
            self._caller, self._caller.request("GET", f"{self._sandbox}/tree", query)
        )

    def upload_tree(
        self,
        local: str | Path,
        remote: PathLike,
        *,
        user: str | None = None,
        progress: OnProgress | None = None,
    ) -> int:
        """Copy a local directory's contents below a directory of the sandbox; how many entries.

        Links stay links, modes stay, owners become `user`. One request: all of it or an error.
        """
        root = Path(local)

        def pack() -> Iterator[bytes]:
            return _tar.pack(root, progress)

        def body() -> Iterator[bytes]:
            return _blocking.iterate_blocking(pack())

        _blocking.in_thread(lambda: _tar.check_source(root))
        return self._put_tree(remote, body, again=True, user=user)

    def download_tree(
        self,
        remote: PathLike,
        local: str | Path,
        *,
        user: str | None = None,
        progress: OnProgress | None = None,
    ) -> _tar.Unpacked:
        """Copy a directory's contents below a local directory, which is made.

        What a sandbox sends is not trusted: nothing is written outside `local`, links are never
        followed, devices and links that lead out are skipped and named in the answer, set-user-id
        bits are dropped, and everything belongs to you.
        """
        target = Path(local)
        with self.get_tar(remote, user=user) as stream:
            return _blocking.consume_blocking(
                stream, lambda pull: _tar.unpack(pull, target, progress)
            )


class _Source:
    """What is to be written, and whether it can be read more than once."""

    def __init__(self, data: Data) -> None:
        self.whole: bytes | None = None
        """All of it, if it is in memory."""
        self._file: Path | None = None
        self._iterable: Iterable[bytes] = ()
        match data:
            case str():
                self.whole = data.encode()
            case bytes() | bytearray() | memoryview():
                self.whole = bytes(data)
            case Path():
                self._file = data
            case Iterable():
                self._iterable = data
            case _:
                raise InvalidRequest(
                    f"cannot write a {type(data).__name__}; give bytes or text"
                )
        self.again = self.whole is not None or self._file is not None
        self._used = False
        self._hash = hashlib.sha256(self.whole or b"")

    def known_sha256(self) -> str | None:
        """The digest, if it is known before anything is sent."""
        return None if self.whole is None else self._hash.hexdigest()

    def chunks(self) -> Iterator[bytes]:
        """The bytes from the start, hashed on the way."""
        self._hash = hashlib.sha256()
        for data in self._raw():
            self._hash.update(data)
            yield data

    def _raw(self) -> Iterator[bytes]:
        if self.whole is not None:
            return _blocking.as_iterator([self.whole])
        if self._file is not None:
            return _blocking.read_file(self._file)
        if self._used:
            raise Unavailable(
                "the connection was lost, and an iterator cannot be read again"
            )
        self._used = True
        return _blocking.as_iterator(self._iterable)

    def verify(self, info: WireFileInfo, *, append: bool) -> None:
        """See that what arrived is what was sent."""
        if info.sha256 and not append and info.sha256 != self._hash.hexdigest():
            raise InternalError(f"{info.path}: what was written is not what was sent")
