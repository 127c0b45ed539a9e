"""HTTP/1.1 between a sandbox and servers: both sides are understood, nothing passes that is not.

Every request of a connection is routed on its own. What is sent on is written anew from what was
understood, so that the server cannot understand it otherwise: one framing, no folded headers, no
trailers, and of the headers about the connection only an upgrade.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from http import HTTPStatus

import anyio
import h11
from anyio.abc import ByteStream
from msgspec import Struct
from typing_extensions import override

from dsec.edge.network.warden.messages import Credential
from dsec.edge.network.warden.reach import Address
from dsec.edge.network.warden.settings import Limits
from dsec.edge.network.warden.streams import (
    BROKEN,
    CHUNK_BYTES,
    Peekable,
    has_something,
    join,
    reset_on_close,
)

Header = tuple[bytes, bytes]
_OF_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer",
     b"proxy-authenticate", b"upgrade", b"transfer-encoding", b"http2-settings")
)  # fmt: skip
_SWITCHED = HTTPStatus.SWITCHING_PROTOCOLS


class Refusal(Exception):
    """A request that is not sent on; the text is for the sandbox."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Tunnel(Exception):
    """A request after which the connection carries something else to a target."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host)
        self.target = target


class Target(Struct, frozen=True, kw_only=True):
    """Where a request goes."""

    host: str
    """Its name or, if it has none, its address."""
    addresses: tuple[Address, ...]
    """To be tried in this order."""
    port: int
    tls: bool = False


class Route(Struct, frozen=True, kw_only=True):
    """Where a request goes, and as what."""

    target: Target
    resource: bytes
    """Path and query."""
    authority: bytes
    """For the Host header."""
    credentials: tuple[Credential, ...] = ()

    @override
    def __repr__(self) -> str:
        return f"Route({self.target!r})"


Router = Callable[[h11.Request], Awaitable[Route]]
"""Raises Refusal, Tunnel."""
Connect = Callable[[Target], Awaitable[ByteStream]]
"""Raises OSError, TimeoutError."""


class _Upstream:
    """A connection to a server, kept between requests to the same target."""

    def __init__(self, target: Target, stream: ByteStream, limits: Limits) -> None:
        self.target = target
        self.stream = stream
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.head_bytes)

    def renew(self) -> bool:
        """Get ready for another request; whether that can be."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True


class HttpRelay:
    """One sandbox's connection."""

    def __init__(self, client: Peekable, route: Router, connect: Connect, limits: Limits) -> None:
        """Say nothing yet.

        Args:
            client: the connection.
            route: decides on each request.
            connect: opens a connection to a target.
            limits: bounds.
        """
        self._client = client
        self._route = route
        self._connect = connect
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._upstream: _Upstream | None = None
        self._tunnel: Target | None = None

    async def run(self) -> Target | None:
        """Serve requests until one of both sides ends.

        Returns:
            Where to carry what follows, if the last request asked for a tunnel.
        """
        deadline_s = self._limits.head_s
        try:
            while await self._serve_one(deadline_s):
                deadline_s = self._limits.keep_alive_s
        except (*BROKEN, TimeoutError):
            return None
        except h11.ProtocolError:
            await self._refuse(Refusal(HTTPStatus.BAD_REQUEST, "not understood"))
        finally:
            await self._drop_upstream()
        return self._tunnel

    async def _serve_one(self, deadline_s: float) -> bool:
        """One request and its answer; whether another may follow."""
        with anyio.fail_after(deadline_s):
            request = await _next_event(self._http, self._client)
        if not isinstance(request, h11.Request):
            return False
        try:
            route = await self._route(request)
            upstream = await self._reach(route.target)
        except Refusal as refusal:
            await self._refuse(refusal)
            return False
        except Tunnel as tunnel:
            await self._open_tunnel(tunnel.target)
            return False
        return await self._exchange(request, route, upstream)

    async def _open_tunnel(self, target: Target) -> None:
        await _next_event(self._http, self._client)  # the end of the request
        await self._client.send(_sent(self._http, h11.Response(status_code=200, headers=[])))
        self._client.unread(self._http.trailing_data[0])
        self._tunnel = target

    async def _reach(self, target: Target) -> _Upstream:
        kept = self._upstream
        if kept is not None and kept.target == target and not has_something(kept.stream):
            return kept
        await self._drop_upstream()
        try:
            stream = await self._connect(target)
        except TimeoutError:
            raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, "the server does not answer") from None
        except OSError:
            # What exactly went wrong may be about this host's inside.
            raise Refusal(HTTPStatus.BAD_GATEWAY, "the server cannot be reached") from None
        self._upstream = _Upstream(target, stream, self._limits)
        return self._upstream

    async def _drop_upstream(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            await anyio.aclose_forcefully(upstream.stream)

    async def _exchange(self, request: h11.Request, route: Route, upstream: _Upstream) -> bool:
        sent_on = h11.Request(
            method=request.method,
            target=route.resource,
            headers=_request_headers(request, route),
        )
        await upstream.stream.send(_sent(upstream.http, sent_on))
        with anyio.move_on_after(self._limits.idle_s) as idle:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_body, upstream, idle)
                switched = await self._send_answer(upstream, idle)
                tasks.cancel_scope.cancel()
        if idle.cancelled_caught:
            return False
        if switched:
            await self._join(upstream)
            return False
        return await self._renew(upstream)

    async def _renew(self, upstream: _Upstream) -> bool:
        if not upstream.renew():
            await self._drop_upstream()
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def _join(self, upstream: _Upstream) -> None:
        """The two speak another protocol from here on, as both have said."""
        self._client.unread(self._http.trailing_data[0])
        there = Peekable(upstream.stream)
        there.unread(upstream.http.trailing_data[0])
        await join(self._client, there, self._limits.idle_s)

    async def _send_body(self, upstream: _Upstream, idle: anyio.CancelScope) -> None:
        """Pass the request's body on; a server that has heard enough ends this, not the answer."""
        try:
            while True:
                event = await _next_event(self._http, self._client)
                idle.deadline = anyio.current_time() + self._limits.idle_s
                if isinstance(event, h11.Data):
                    await upstream.stream.send(_sent(upstream.http, h11.Data(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    await upstream.stream.send(_sent(upstream.http, h11.EndOfMessage()))
                    return
                else:
                    return
        except (*BROKEN, h11.LocalProtocolError):
            return
        except h11.RemoteProtocolError:
            idle.cancel()

    async def _send_answer(self, upstream: _Upstream, idle: anyio.CancelScope) -> bool:
        """Pass the answer on; whether it switches to another protocol.

        A server that breaks HTTP before its answer began is told as such, later by the end alone.
        """
        try:
            while True:
                event = await _next_event(upstream.http, upstream.stream)
                idle.deadline = anyio.current_time() + self._limits.idle_s
                if isinstance(event, h11.InformationalResponse):
                    await self._client.send(_sent(self._http, _informational(event)))
                    if event.status_code == _SWITCHED:
                        return True
                elif isinstance(event, h11.Response):
                    await self._client.send(_sent(self._http, _response(event)))
                elif isinstance(event, h11.Data):
                    await self._client.send(_sent(self._http, h11.Data(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    await self._client.send(_sent(self._http, h11.EndOfMessage()))
                    return False
                else:
                    break  # it closed
        except (h11.ProtocolError, anyio.BrokenResourceError):
            pass
        await self._refuse(Refusal(HTTPStatus.BAD_GATEWAY, "the server's answer is broken"))
        if self._http.our_state in {h11.SEND_BODY, h11.ERROR}:
            reset_on_close(self._client)  # it must not look like all there was
        return False

    async def _refuse(self, refusal: Refusal) -> None:
        """Answer in the server's place, if its answer has not begun."""
        if self._http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        body = f"{refusal}\n".encode()
        headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=refusal.status, headers=headers)
        try:
            head = _sent(self._http, response)
            await self._client.send(head + _body(self._http, body))
        except (*BROKEN, h11.LocalProtocolError):
            return


def _body(http: h11.Connection, body: bytes) -> bytes:
    """A whole body; nothing where the request was one for the head alone."""
    return _sent(http, h11.Data(body)) + _sent(http, h11.EndOfMessage())


async def _next_event(
    http: h11.Connection, stream: ByteStream
) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
    while True:
        event = http.next_event()
        if event is not h11.NEED_DATA:
            return event
        try:
            http.receive_data(await stream.receive(CHUNK_BYTES))
        except anyio.EndOfStream:
            http.receive_data(b"")


def _sent(http: h11.Connection, event: h11.Event) -> bytes:
    return http.send(event) or b""


def _request_headers(request: h11.Request, route: Route) -> list[Header]:
    headers = _end_to_end(request.headers.raw_items(), request=True)
    replaced = {_plain(credential.header.encode()) for credential in route.credentials}
    kept = [h for h in headers if h[0].lower() != b"host" and _plain(h[0]) not in replaced]
    added = [(c.header.encode(), c.value.encode()) for c in route.credentials]
    return [(b"Host", route.authority), *kept, *added]


def _plain(name: bytes) -> bytes:
    """A header's name as servers may see it that map `_` and `-` to one."""
    return name.lower().replace(b"_", b"-")


def _end_to_end(items: Iterable[Header], *, request: bool) -> list[Header]:
    """Without what is about this connection alone, and with one framing."""
    headers = [(bytes(name), bytes(value)) for name, value in items]
    named = _tokens(headers, b"connection")
    chunked = bool(_tokens(headers, b"transfer-encoding"))
    dropped = _OF_CONNECTION | (named - {b"host", b"content-length"})
    if chunked:
        dropped |= {b"content-length"}
    kept = [h for h in headers if h[0].lower() not in dropped]
    if chunked:
        kept.append((b"Transfer-Encoding", b"chunked"))
    upgrade = [h for h in headers if h[0].lower() == b"upgrade"]
    if b"upgrade" in named and (upgrade or not request):
        kept += [*upgrade, (b"Connection", b"Upgrade")]
    return kept


def _tokens(headers: Sequence[Header], name: bytes) -> frozenset[bytes]:
    values = (value for key, value in headers if key.lower() == name)
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def _informational(event: h11.InformationalResponse) -> h11.InformationalResponse:
    headers = _end_to_end(event.headers.raw_items(), request=False)
    return h11.InformationalResponse(status_code=event.status_code, headers=headers)


def _response(event: h11.Response) -> h11.Response:
    headers = _end_to_end(event.headers.raw_items(), request=False)
    return h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
