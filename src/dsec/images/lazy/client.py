"""The filler from the edge: its socket as a Python object (spec/filler.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Struct

from dsec.base.errors import DsecError, Unavailable, error_from
from dsec.wire.filler import (
    DataEvent,
    DataOpened,
    FillerStatus,
    OpenData,
    Prefetch,
    Recording,
    RecordingStarted,
    StartRecording,
)
from dsec.wire.public_v1 import ErrorAnswer

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
"""Of one call; longer than the filler waits for anything."""
CONNECT_TIMEOUT_S = 5.0
_SPANS_AT_ONCE = 8192
"""Of a prefetch: the filler takes no body that it would be busy with for long."""
SILENCE_S = 30.0
"""A stream that is silent for longer, heartbeats included, is broken."""


class _Line(Struct):
    """What a line of the stream says of itself."""

    type: str = ""
    code: str = ""
    message: str = ""
    http_status: int = 500


class FillerClient:
    """Speaks to one filler. A context manager, or to be closed with `aclose`.

    Every method may raise Unavailable: the filler is away, being started again, or does not answer
    in time. All of them may be called again then.
    """

    def __init__(self, socket: Path, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Describe the way; nothing is opened yet.

        Args:
            socket: where the filler listens.
            timeout_s: deadline of each call.
        """
        self._socket = socket
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    async def status(self) -> FillerStatus:
        """The filler as it stands."""
        return _decoded(await self._call("GET", "/v1/status"), FillerStatus)

    async def open(self, request: OpenData) -> Path:
        """Serve a device; returns where it is.

        Raises:
            InvalidRequest: its sizes and its table do not fit together.
            StorageFull: no room for it in the cache.
        """
        answer = await self._call("PUT", "/v1/data", request)
        return Path(_decoded(answer, DataOpened).path)

    async def close(self, digest: str) -> None:
        """Serve a device no more; its chunks stay. Harmless if it is not served."""
        await self._call("DELETE", f"/v1/data/{quote(digest, safe=':')}")

    async def prefetch(self, request: Prefetch) -> None:
        """Have chunks fetched. Raises NotFound if the device is not open."""
        for start in range(0, max(1, len(request.spans)), _SPANS_AT_ONCE):
            part = request.spans[start : start + _SPANS_AT_ONCE]
            await self._call("POST", "/v1/prefetch", Prefetch(digest=request.digest, spans=part))

    async def start_recording(self, request: StartRecording) -> list[Path]:
        """Devices whose reads are written down, in the order asked for.

        Raises:
            NotFound: one of them is not open.
            Conflict: the recording runs with other devices.
        """
        answer = await self._call("POST", "/v1/recordings", request)
        return [Path(path) for path in _decoded(answer, RecordingStarted).paths]

    async def recording(self, recording: str) -> Recording:
        """What was read so far. Raises NotFound."""
        return _decoded(await self._call("GET", _recording(recording)), Recording)

    async def end_recording(self, recording: str) -> None:
        """Take its devices away. Harmless if there is none."""
        await self._call("DELETE", _recording(recording))

    async def shutdown(self) -> None:
        """Have the filler end, and with it what the kernel reads through it."""
        await self._call("POST", "/v1/shutdown")

    async def events(self) -> AsyncIterator[DataEvent]:
        """Devices that begin to fail or work again; first all that fail now.

        Raises:
            Unavailable: the stream broke; begin again, it starts with all that fail.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_S)
        async with self._request("GET", "/v1/events", None, timeout) as answer:
            with _named(self._socket):
                async for line in answer.content:
                    if (event := _event(line)) is not None:
                        yield event
        raise Unavailable(f"the filler at {self._socket} ended the stream")

    async def aclose(self) -> None:
        """Close connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _call(self, method: str, path: str, body: object = None) -> bytes:
        async with self._request(method, path, body, self._timeout) as answer:
            with _named(self._socket):
                return await answer.read()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: object, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else msgspec.json.encode(body)
        with _named(self._socket):
            answer = await self._connected().request(
                method, f"http://filler{path}", data=data, timeout=timeout
            )
        async with answer:
            if answer.status >= HTTPStatus.BAD_REQUEST:
                with _named(self._socket):
                    said = await answer.read()
                raise _error(said, answer.status)
            yield answer

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(path=str(self._socket), limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


class _named:  # noqa: N801 - reads as a statement
    """Turns what aiohttp raises into Unavailable."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        exc: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Raise the error a caller can act on."""
        if isinstance(exc, TimeoutError):
            raise Unavailable(f"the filler at {self._socket} does not answer in time") from exc
        if isinstance(exc, aiohttp.ClientError | OSError):
            raise Unavailable(f"the filler at {self._socket} is away: {exc}") from exc


def _recording(name: str) -> str:
    return f"/v1/recordings/{quote(name, safe='')}"


def _decoded(body: bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.MsgspecError as exc:
        raise Unavailable(f"the filler's answer cannot be understood: {exc}") from exc


def _event(line: bytes) -> DataEvent | None:
    """An event, or None for a heartbeat."""
    said = _decoded(line, _Line)
    if said.type == "error":
        raise error_from(said.code, said.message, None, said.http_status)
    return None if said.type else _decoded(line, DataEvent)


def _error(body: bytes, status: int) -> DsecError:
    try:
        error = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.MsgspecError:
        return Unavailable(f"the filler answered {status}")
    return error_from(error.code, error.message, error.details, status)
