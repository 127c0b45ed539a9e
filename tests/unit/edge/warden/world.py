"""A whole warden in this process: real sockets, its own resolver and servers, a fake kernel."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from typing import Self

import anyio
import anyio.abc
import dns.message
import dns.rcode
import msgspec
from anyio.abc import ConnectedUDPSocket, SocketStream
from typing_extensions import override

from dsec.edge.network.never import never
from dsec.edge.network.policy import NameRule, Span
from dsec.edge.network.warden import places
from dsec.edge.network.warden.denials import Denials
from dsec.edge.network.warden.dns_server import DnsServer
from dsec.edge.network.warden.guests import Guests, KernelNames
from dsec.edge.network.warden.lookups import Lookups
from dsec.edge.network.warden.messages import Assign, Credential, HeldName, Reach
from dsec.edge.network.warden.places import Destination
from dsec.edge.network.warden.proxy import Proxy
from dsec.edge.network.warden.resolver import Resolver
from dsec.edge.network.warden.settings import Limits, Settings
from dsec.edge.network.warden.upstream import Servers, Upstream
from dsec.linux.network_filter import PortSpan
from dsec.wire.sandbox import DeniedTraffic
from tests.unit.edge.warden.names import NameServer
from tests.unit.edge.warden.sites import Authority, Sites

ME, OTHER = "127.0.0.1", "127.0.0.2"
"""Addresses of two sandboxes."""
WEB = (Span("tcp", 80, 80), Span("tcp", 443, 443))
ALL = (Span("tcp"), Span("udp"))


class SetClock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


class FakeKernel(KernelNames):
    """Maps as dicts."""

    def __init__(self) -> None:
        self.maps: dict[str, dict[str, tuple[tuple[PortSpan, ...], float]]] = {}
        self.gone = False

    @override
    async def add(self, pins: str, held: Sequence[HeldName]) -> None:
        if self.gone:
            raise FileNotFoundError(pins)
        for each in held:
            address = str(ip_address(each.address))
            self.maps.setdefault(pins, {})[address] = each.spans, each.ttl_s


def allow(pattern: str, *spans: Span, allowed: bool = True) -> NameRule:
    return NameRule(pattern=pattern, spans=spans or WEB, allowed=allowed)


def assigned(
    *names: NameRule,
    address4: str = ME,
    sandbox: str = "sb-1",
    networks: Sequence[Reach] = (),
    secrets: Sequence[Credential] = (),
) -> Assign:
    return Assign(
        sandbox=sandbox,
        address4=address4,
        pins=f"/pins/{address4}",
        names=tuple(names),
        networks=tuple(networks),
        secrets=tuple(secrets),
    )


class Answered:
    """An answer in plain words."""

    def __init__(self, message: dns.message.Message) -> None:
        self.message = message
        self.code = dns.rcode.to_text(message.rcode())
        self.addresses = [r.to_text() for rrset in message.answer for r in rrset]
        self.ttl_s = message.answer[0].ttl if message.answer else 0


class World:
    """Everything of one warden."""

    def __init__(self, server: NameServer, sites: Sites, authority: Authority) -> None:
        self.server = server
        self.sites = sites
        self.authority = authority
        self.clock = SetClock()
        self.kernel = FakeKernel()
        self.limits = Limits(upstream_attempt_s=2.0)
        self.to: Destination | None = None
        """Where inspected connections want to go."""
        self._scope = anyio.CancelScope()

    def wants(self, address: str, port: int) -> None:
        self.to = ip_address(address), port

    def limited(self, **limits: object) -> None:
        """Begin anew with other limits."""
        self.limits = msgspec.structs.replace(self.limits, **limits)
        self._begin()

    def _wire(self) -> None:
        settings = Settings(gateway4=ME, resolvers=(f"127.0.0.1#{self.server.port}",))
        self.denials = Denials(self.limits, self.clock)
        self.guests = Guests(self.kernel, self.limits, self.clock)
        upstream = Upstream(Servers(settings, self.clock), self.limits)
        self.resolver = Resolver(
            self.guests,
            Lookups(upstream.ask, self.limits, self.clock),
            self.denials,
            self.clock,
            self.limits,
            never=never([ip_network("203.0.113.200/32")]),
            local_names=frozenset({"mirror.example"}),
        )
        self._dns = DnsServer(self.guests, self.resolver, self.limits)
        self._proxy = Proxy(
            self.guests,
            self.resolver,
            self.denials,
            self.sites.connect,
            self.clock,
            self.limits,
            lambda _stream: self.to,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        async with anyio.create_task_group() as self._tasks:
            self._begin()
            yield self
            self._tasks.cancel_scope.cancel()

    def _begin(self) -> None:
        self._scope.cancel()
        self._scope = anyio.CancelScope()
        self._wire()
        settings = Settings(
            gateway4=ME, gateway6="::1", dns_port=0, proxy_port=0, transparent_port=0
        )
        opened = places.opened(settings, transparent=False)
        self.ports = opened.ports()
        self._tasks.start_soon(self._serve, opened, self._scope)

    async def _serve(self, opened: places.Places, scope: anyio.CancelScope) -> None:
        with scope:
            async with anyio.create_task_group() as tasks:
                for sock in opened.dns_udp:
                    tasks.start_soon(self._serve_udp, sock)
                for what in ("dns_tcp", "transparent", "proxy"):
                    for sock in getattr(opened, what):
                        tasks.start_soon(self._listen, sock, what)

    async def _serve_udp(self, sock: socket.socket) -> None:
        await self._dns.serve_udp(await places.datagrams(sock))

    async def _listen(self, sock: socket.socket, what: str) -> None:
        listener = await places.listener(sock)
        if what == "dns_tcp":
            await self._dns.serve_tcp(listener)
        elif what == "transparent":
            await self._proxy.serve_transparent(listener)
        else:
            await self._proxy.serve_explicit(listener)

    # What a sandbox does.

    async def ask(self, name: str, kind: str = "A", source: str = ME) -> Answered:
        query = dns.message.make_query(name, kind)
        return Answered(dns.message.from_wire(await self.ask_raw(query.to_wire(), source)))

    async def ask_raw(self, wire: bytes, source: str = ME) -> bytes:
        async with self.datagrams(source) as udp:
            await udp.send(wire)
            with anyio.fail_after(20):
                return await udp.receive()

    @asynccontextmanager
    async def datagrams(self, source: str = ME) -> AsyncIterator[ConnectedUDPSocket]:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.bind((source, 0))
        sock.connect((ME, self.ports["dns_udp"]))
        async with await ConnectedUDPSocket.from_socket(sock) as udp:
            yield udp

    async def connect(self, kind: str = "transparent", source: str = ME) -> SocketStream:
        return await anyio.connect_tcp(ME, self.ports[kind], local_host=source)

    # What there is to see.

    def denied(self, sandbox: str = "sb-1") -> list[DeniedTraffic]:
        return [e for m in self.denials.take() if m.sandbox == sandbox for e in m.events]

    def reasons(self, sandbox: str = "sb-1") -> dict[str, int]:
        found: dict[str, int] = {}
        for event in self.denied(sandbox):
            found[event.reason] = found.get(event.reason, 0) + event.count
        return found

    def reachable(self, address4: str = ME) -> dict[str, tuple[PortSpan, ...]]:
        return {
            at: spans for at, (spans, _) in self.kernel.maps.get(f"/pins/{address4}", {}).items()
        }


async def until_eof(stream: anyio.abc.ByteReceiveStream) -> bytes:
    """All that comes until the other side ends or resets."""
    data = b""
    with (
        anyio.fail_after(20),
        contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError, ConnectionError),
    ):
        while True:
            data += await stream.receive()
    return data
