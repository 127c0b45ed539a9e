"""Requests and answers as they pass by, for the record: sizes, digests, and what is small."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Message, Receive, Send

from dsec.base.errors import PayloadTooLarge
from dsec.edge.recording_values import SMALL_BYTES, bounded
from dsec.kit.http import MAX_BODY_BYTES
from dsec.kit.table import JSON, NDJSON
from dsec.trajectory.index import OK, UNKNOWN
from dsec.wire.sandbox import StreamError

ANSWER_BYTES = 64 << 10
"""Of an answer, kept for the record and for who asks again."""
INTERRUPTED = "unavailable"
FAILURE = 400
"""Statuses from here on: the answer is an error, in JSON."""
_json = msgspec.json.Decoder()
_stream_error = msgspec.json.Decoder(StreamError)


class RequestBody:
    """A request's body on its way to the handler (ASGI receive)."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: list[Message] = []
        self._hash = hashlib.sha256()
        self._begins = b""
        self.size_bytes = 0

    async def __call__(self) -> Message:
        """The next message."""
        message = self._ahead.pop(0) if self._ahead else await self._receive()
        if message["type"] == "http.request" and (data := message.get("body")):
            if self.size_bytes <= SMALL_BYTES:
                self._begins = (self._begins + data)[: SMALL_BYTES + 1]
            self.size_bytes += len(data)
            self._hash.update(data)
        return message

    @property
    def digest(self) -> bytes:
        """sha256 of what has passed; nothing if nothing has."""
        return self._hash.digest() if self.size_bytes else b""

    @property
    def small(self) -> bytes:
        """What has passed, if it is little enough to be kept whole; else nothing."""
        return self._begins if self.size_bytes <= SMALL_BYTES else b""

    async def whole(self) -> bytes:
        """All of it, ahead of the handler, who gets it all the same.

        Raises:
            PayloadTooLarge: it is over the limit of JSON bodies.
        """
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            self._ahead.append(message)
            more = message["type"] == "http.request" and message.get("more_body", False)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY_BYTES:
                raise PayloadTooLarge(
                    f"the body is over {MAX_BODY_BYTES} bytes", limit=MAX_BODY_BYTES
                )
        return b"".join(parts)

    async def drain(self) -> None:
        """Let all of it pass, to nobody."""
        more = True
        while more:
            message = await self()
            more = message["type"] == "http.request" and message.get("more_body", False)


class Answer:
    """An answer on its way out (ASGI send)."""

    def __init__(
        self,
        send: Send,
        media_type: str,
        over: Callable[[], Awaitable[None]],
        *,
        tells: bool = False,
    ) -> None:
        """Pass an answer on.

        Args:
            send: to whom.
            media_type: of an answer that is no error.
            over: awaited before its last byte leaves.
            tells: its lines tell of sandboxes made; others are not looked into.
        """
        self._send = send
        self._media_type = media_type
        self._over = over
        self._tells = tells
        self._start: Message | None = None
        self._kept = bytearray()
        self._size = 0
        self._children: list[str] = []
        self._last = b""
        """The last line of an answer that is a stream, if it is short."""
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self._start, self.status = message, message["status"]
            return
        if message["type"] == "http.response.body":
            self._keep(message.get("body", b""))
            if not message.get("more_body", False):
                await self._over()
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
        await self._send(message)

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._media_type == NDJSON and self.status < FAILURE:
            if self._tells:
                self._children += _children(data)
            self._last = _last_line(data) or self._last
        elif self._kept_whole and len(self._kept) + len(data) <= ANSWER_BYTES:
            self._kept += data

    @property
    def _kept_whole(self) -> bool:
        return self._media_type == JSON or self.status >= FAILURE

    def outcome(self) -> tuple[str, dict[str, Any]]:
        """What the answer says: `ok` and its content, or an error's code."""
        broken = _broken(self._last)
        if self._media_type == NDJSON and self._children:
            return OK, {"children": self._children} | ({"error": broken.message} if broken else {})
        if broken:
            return broken.code, {"message": broken.message}
        said = self._said()
        if isinstance(said, dict) and isinstance(error := said.get("error"), dict):
            return str(error.get("code", "")), {"message": error.get("message", "")}
        if self.status >= FAILURE:
            return INTERRUPTED, {"status": self.status}
        return OK, _result(said) if self._media_type == JSON else {"size_bytes": self._size}

    def _said(self) -> object:
        if not self._kept or len(self._kept) < self._size:
            return None
        try:
            return _json.decode(self._kept)
        except msgspec.MsgspecError:
            return None


def _result(said: object) -> dict[str, Any]:
    if said is None:
        return {}
    return said if isinstance(said, dict) else bounded({"answer": said})


def _last_line(lines: bytes) -> bytes:
    last = lines.rstrip().rpartition(b"\n")[2]
    return last if len(last) <= SMALL_BYTES else b""


def _broken(line: bytes) -> StreamError | None:
    """Why a stream ended, if that is what its last line says."""
    try:
        return _stream_error.decode(line)
    except msgspec.MsgspecError:
        return None


def _children(lines: bytes) -> list[str]:
    """Ids of sandboxes that a stream of batch items tells of."""
    found = []
    for line in lines.splitlines():
        try:
            item = _json.decode(line)
        except msgspec.MsgspecError:
            continue
        if isinstance(item, dict) and isinstance(made := item.get("sandbox"), dict):
            found.append(str(made.get("id", "")))
    return found


assert INTERRUPTED in UNKNOWN  # noqa: S101 - it may or may not have happened
