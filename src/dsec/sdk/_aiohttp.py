"""The network by aiohttp, for the asynchronous SDK; `_urllib3` is its twin, name for name.

Imported when the first transport is made: it takes as long as all the rest of the SDK.
"""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

import aiohttp
import anyio
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import LooseHeaders
from typing_extensions import override
from yarl import URL

from dsec.base.errors import InvalidRequest, Unavailable, Unsupported
from dsec.sdk import _aio
from dsec.sdk._answers import http_error
from dsec.sdk._http import ENDED_WELL, SOCKET_OPTIONS, Address, ConnectionFailed, Request
from dsec.sdk._patience import HEARD_WITHIN_S

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 30.0
"""How long an unused connection is kept: less than the server does."""
MESSAGE_BYTES = 64 << 10
LONGEST_MESSAGE_BYTES = 16 << 20
CLOSE_WAIT_S = 2.0
LARGE_BYTES = 1 << 20
_HEADERS = {"Accept-Encoding": "identity"}


class HttpResponse:
    """See Response. One read to its end gives its connection back by itself."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._closed = self._broken = False
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def receive(self, timeout: float) -> bytes:
        """See Response."""
        if self._broken:
            raise ConnectionFailed("given up before its end", sent=True)
        if self._closed:
            return b""
        content = self._response.content
        try:
            if data := content.read_nowait():
                return data
            if content.at_eof():
                return b""
            with anyio.fail_after(timeout):
                return await content.readany()
        except BaseException as exc:
            # Also when we are cancelled: nobody may come back to close it.
            self._broken = True
            self._response.close()
            if isinstance(exc, TimeoutError):
                raise ConnectionFailed(f"nothing heard for {timeout:.0f} s", sent=True) from exc
            if isinstance(exc, (aiohttp.ClientError, OSError)):
                raise ConnectionFailed(f"connection lost: {_words(exc)}", sent=True) from exc
            raise

    async def aclose(self) -> None:
        """See Response."""
        self._closed = True
        self._response.close()


class WebSocket:
    """See PortStream: binary messages, an empty one ends its direction."""

    def __init__(self, stream: aiohttp.ClientWebSocketResponse) -> None:
        self._stream = stream
        self._ended = False

    async def send(self, data: bytes) -> None:
        """See PortStream."""
        for start in range(0, len(data), MESSAGE_BYTES):
            await self._send(data[start : start + MESSAGE_BYTES])

    async def send_eof(self) -> None:
        """See PortStream."""
        await self._send(b"")

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send_bytes(data)
        except (aiohttp.ClientError, OSError) as exc:
            raise Unavailable(f"the stream broke off: {_words(exc)}") from exc

    async def receive(self) -> bytes:
        """See PortStream."""
        pinged = False
        while not self._ended:
            try:
                message = await self._stream.receive(HEARD_WITHIN_S / 2)
            except TimeoutError:
                # The library's own heartbeat would also break a stream nobody reads from just now.
                if pinged:
                    raise Unavailable("the stream broke off: nothing heard") from None
                pinged = True
                await self._say(aiohttp.WSMsgType.PING, b"")
                continue
            pinged = False
            if data := await self._take(message):
                return data
        return b""

    async def _take(self, message: aiohttp.WSMessage) -> bytes:
        match message.type:
            case aiohttp.WSMsgType.BINARY | aiohttp.WSMsgType.TEXT:
                data: bytes | str = message.data
                self._ended = not data
                return data.encode() if isinstance(data, str) else data
            case aiohttp.WSMsgType.PING:
                await self._say(aiohttp.WSMsgType.PONG, message.data)
            case aiohttp.WSMsgType.PONG:
                pass
            case aiohttp.WSMsgType.CLOSE if (message.data or 1005) in ENDED_WELL:
                self._ended = True
            case _:
                reason = message.extra or message.data or "the connection was lost"
                raise Unavailable(f"the stream broke off: {reason}")
        return b""

    async def _say(self, kind: aiohttp.WSMsgType, data: bytes) -> None:
        try:
            await self._stream.send_frame(data, kind)
        except (aiohttp.ClientError, OSError) as exc:
            raise Unavailable(f"the stream broke off: {_words(exc)}") from exc

    async def aclose(self) -> None:
        """See PortStream."""
        self._ended = True
        with _aio.finishing(CLOSE_WAIT_S):
            await self._stream.close()


class HttpTransport:
    """HTTP/1.1 and WebSockets over TCP or TLS, on asyncio.

    There is no upper limit of connections: every call in flight has its own, as a trainer that
    starts a thousand sandboxes at once needs.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None = None) -> None:
        self._base = str(address)
        self._tls = tls
        self._kept: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    @override
    def __repr__(self) -> str:
        return f"HttpTransport({self._base!r})"

    async def send(
        self, request: Request, body: AsyncIterator[bytes] | None, timeout: float
    ) -> HttpResponse:
        """See Transport."""
        with anyio.move_on_after(timeout) as scope:
            if request.repeatable and body is None:
                self._kept = self._kept or self._session(keep=True)
                try:
                    return await self._exchange(self._kept, request, _whole(request.body))
                except ConnectionFailed as exc:
                    if not exc.sent:
                        raise
                    # Perhaps it was a kept connection the server had just closed.
            # What cannot be sent twice must not meet such a one.
            self._fresh = self._fresh or self._session(keep=False)
            if body is None:
                return await self._exchange(self._fresh, request, _whole(request.body))
            return await self._send_stream(self._fresh, request, _Upload(body, scope, timeout))
        raise ConnectionFailed(f"nothing heard for {timeout:.0f} s", sent=True)

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        request: Request,
        body: bytes | io.BytesIO | aiohttp.Payload | None,
    ) -> HttpResponse:
        response = await session.request(
            request.method,
            URL(f"{self._base}{request.target}", encoded=True),
            data=body,
            headers=request.headers,
            allow_redirects=False,
        )
        return HttpResponse(response)

    async def _send_stream(
        self, session: aiohttp.ClientSession, request: Request, upload: _Upload
    ) -> HttpResponse:
        answer: HttpResponse | Exception = ConnectionFailed("given up", sent=True)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(upload.pump)
                try:
                    answer = await self._exchange(session, request, upload)
                except Exception as exc:  # noqa: BLE001 - raised outside the group
                    answer = exc
                if isinstance(answer, Exception) or answer.status >= 300:
                    group.cancel_scope.cancel()
        except BaseException:  # cancelled while the rest of the body was on its way
            if isinstance(answer, HttpResponse):
                await answer.aclose()
            raise
        finally:
            upload.drawn.close()
        if isinstance(answer, Exception):
            raise upload.failure or answer
        if upload.failure is not None:
            await answer.aclose()
            raise upload.failure
        return answer

    async def websocket(self, request: Request, timeout: float) -> WebSocket:
        """See Transport."""
        headers: LooseHeaders = request.headers
        with anyio.move_on_after(timeout):
            self._fresh = self._fresh or self._session(keep=False)
            stream = await self._fresh.ws_connect(
                URL(f"{self._base}{request.target}", encoded=True),
                headers=headers,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_WAIT_S),
                autoping=False,
                max_msg_size=LONGEST_MESSAGE_BYTES,
            )
            return WebSocket(stream)
        raise ConnectionFailed(f"nothing heard for {timeout:.0f} s", sent=True)

    def _session(self, *, keep: bool) -> aiohttp.ClientSession:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise Unsupported(
                "the network transport needs asyncio; under Trio give the client another "
                "transport=, or use dsec.sync in a thread"
            ) from None
        connector = aiohttp.TCPConnector(
            ssl=self._tls or True,
            limit=0,
            socket_factory=_socket,
            **({"keepalive_timeout": IDLE_S} if keep else {"force_close": True}),
        )
        return aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            read_bufsize=_aio.CHUNK_BYTES,
            middlewares=(_once,),
        )

    async def aclose(self) -> None:
        """See Transport; using it again opens it again."""
        sessions, self._kept, self._fresh = (self._kept, self._fresh), None, None
        with _aio.finishing(1):
            for session in sessions:
                if session is not None:
                    await session.close()


async def _once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    # aiohttp sends again by itself after errors of its own kinds, what it takes for idempotent by
    # the method; which requests are is ours to know. And it drops the body of a refused upgrade.
    try:
        response = await handler(request)
        if response.status != 101 and "Upgrade" in request.headers:
            raise http_error(response.status, await response.read())
    except aiohttp.ClientConnectorError as exc:
        raise ConnectionFailed(_words(exc.__cause__ or exc), sent=False) from exc
    except aiohttp.ConnectionTimeoutError as exc:
        raise ConnectionFailed(_words(exc), sent=False) from exc
    except ssl.SSLError as exc:
        raise ConnectionFailed(f"TLS: {_words(exc)}", sent=True) from exc
    except ValueError as exc:  # also what aiohttp says of addresses and of header fields
        raise InvalidRequest(f"the request cannot be sent: {exc}") from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise ConnectionFailed(f"connection lost: {_words(exc)}", sent=True) from exc
    return response


class _Upload(aiohttp.Payload):
    """A streamed body. It is drawn from in our task: aiohttp's own hides what goes wrong there."""

    def __init__(
        self, body: AsyncIterator[bytes], scope: anyio.CancelScope, timeout: float
    ) -> None:
        super().__init__(body)
        self._body = body
        self._scope = scope
        self._timeout = timeout
        self._to, self.drawn = anyio.create_memory_object_stream[bytes]()
        self._whole = False
        self.failure: Exception | None = None

    async def pump(self) -> None:
        """Draw the body; whoever waits for the answer waits from its last chunk."""
        with self._to:
            try:
                async for data in self._body:
                    self._scope.deadline = anyio.current_time() + self._timeout
                    if data and not await self._give(data):
                        return
                self._whole = True
            except Exception as exc:  # noqa: BLE001 - whoever sends raises it
                self.failure = exc
            finally:
                if isinstance(self._body, AsyncGenerator):
                    with _aio.finishing(CLOSE_WAIT_S):
                        await self._body.aclose()

    async def _give(self, data: bytes) -> bool:
        try:
            await self._to.send(data)
        except anyio.BrokenResourceError:
            return False  # answered, or broken, before all was sent
        return True

    @override
    async def write(self, writer: AbstractStreamWriter) -> None:
        with self.drawn.clone() as taken:
            self.drawn.close()
            async for data in taken:
                await writer.write(data)
        if not self._whole:
            raise ConnectionAbortedError("the body was given up")

    @override
    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise NotImplementedError


def _whole(data: bytes) -> bytes | io.BytesIO | None:
    return io.BytesIO(data) if len(data) > LARGE_BYTES else data or None


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = info
    sock = socket.socket(family, kind, protocol)
    for level, name, value in SOCKET_OPTIONS:
        sock.setsockopt(level, name, value)
    return sock


def _words(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
