"""The node's own resolvers, asked for addresses.

Each attempt has a socket of its own, hence a random port, a random number and a name in random case;
an answer that repeats the name in another case is asked for again over TCP.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import anyio
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
from anyio.abc import ConnectedUDPSocket
from anyio.streams.buffered import BufferedByteReceiveStream
from msgspec import Struct

from dsec.base.clock import Clock
from dsec.edge.network.warden.reach import Address, as_address
from dsec.edge.network.warden.settings import DNS_PORT, Limits, Settings
from dsec.kit.blocking import in_thread

logger = logging.getLogger("dsec.warden.upstream")

AddressType = Literal["A", "AAAA"]
_LOOK_EVERY_S = 5.0
_MAX_SERVERS = 3
_MAX_CHAIN = 8
_MAX_RESOLV_CONF = 64 * 1024
_UDP_PAYLOAD = 1232
_WRONG = (dns.exception.DNSException, ValueError, IndexError, KeyError)
"""What dnspython raises of bytes that are no proper answer."""
_LOST = (OSError, anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError)


class UpstreamFailed(Exception):
    """No resolver of the node answers this; asking later may help."""


class Found(Struct, frozen=True):
    """What a name has, aliases followed to their end."""

    exists: bool
    addresses: tuple[Address, ...]
    ttl_s: float


Server = tuple[str, int]
Ask = Callable[[str, AddressType], Awaitable[Found]]


def parse_server(text: str) -> Server:
    """`address` or `address#port`. Raises ValueError."""
    host, _, port = text.partition("#")
    if as_address(host) is None:
        raise ValueError(f"no resolver's address: {text!r}")
    return host, int(port or DNS_PORT)


def parse_resolv_conf(text: str) -> tuple[Server, ...]:
    """The first three name servers; those with a zone or no address are left out."""
    lines = [line.split() for line in text.splitlines()]
    hosts = [w[1] for w in lines if len(w) > 1 and w[0] == "nameserver" and as_address(w[1])]
    return tuple((host, DNS_PORT) for host in hosts[:_MAX_SERVERS])


class Servers:
    """Which resolvers to ask: those configured, or the host's, read again when they change."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Read nothing yet. Raises ValueError: a configured one is none."""
        self._fixed = tuple(parse_server(text) for text in settings.resolvers)
        self._file = Path(settings.resolv_conf)
        self._clock = clock
        self._looked = float("-inf")
        self._stamp: tuple[int, int] | None = None
        self._read: tuple[Server, ...] = ()

    async def current(self) -> tuple[Server, ...]:
        """Those to ask now, best first; none if there are none."""
        if self._fixed:
            return self._fixed
        now = self._clock.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            await in_thread("names", self._look)
        return self._read

    def _look(self) -> None:
        try:
            stat = self._file.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp != self._stamp:
                with self._file.open("rb") as file:
                    text = file.read(_MAX_RESOLV_CONF).decode("utf-8", "replace")
                self._stamp, self._read = stamp, parse_resolv_conf(text)
        except OSError as exc:
            logger.warning(
                "cannot read resolvers", extra={"file": str(self._file), "why": str(exc)}
            )


class Upstream:
    """Asks them."""

    def __init__(self, servers: Servers, limits: Limits) -> None:
        self._servers = servers
        self._limits = limits
        self._places = anyio.Semaphore(limits.upstream_at_once)

    async def ask(self, name: str, kind: AddressType) -> Found:
        """The addresses of a name.

        Raises:
            UpstreamFailed: nobody answers, or with an error.
        """
        async with self._places:
            asked, ttl_s = dns.name.from_text(name), float("inf")
            for _ in range(_MAX_CHAIN):
                answer = await self._answer(asked, kind)
                end, addresses, minimum_s = _read(answer)
                ttl_s = min(ttl_s, minimum_s)
                nothing = answer.rcode() == dns.rcode.NXDOMAIN
                if nothing or addresses or end == asked:
                    return Found(exists=not nothing, addresses=addresses, ttl_s=ttl_s)
                asked = end  # an alias whose end this server did not say
        raise UpstreamFailed("aliases without end")

    async def _answer(self, name: dns.name.Name, kind: AddressType) -> dns.message.QueryMessage:
        servers = await self._servers.current()
        for attempt in range(self._limits.upstream_attempts if servers else 0):
            server = servers[attempt % len(servers)]
            with anyio.move_on_after(self._limits.upstream_attempt_s):
                answer = await _ask_one(server, name, kind)
                if answer is not None:
                    return answer
        raise UpstreamFailed("no resolver answers")


def _read(answer: dns.message.QueryMessage) -> tuple[dns.name.Name, tuple[Address, ...], float]:
    """The end of the aliases, its addresses, and for how long all that holds."""
    try:
        chain = answer.resolve_chaining()
    except _WRONG as exc:
        raise UpstreamFailed("a broken answer") from exc
    texts = [rdata.to_text() for rdata in chain.answer or ()]
    addresses = tuple(a for a in map(as_address, texts) if a is not None)
    return chain.canonical_name, addresses, chain.minimum_ttl


async def _ask_one(
    server: Server, name: dns.name.Name, kind: AddressType
) -> dns.message.QueryMessage | None:
    """One server's answer, or None if it gave none that is of use."""
    query = dns.message.make_query(_in_random_case(name), kind, use_edns=0, payload=_UDP_PAYLOAD)
    try:
        answer = await _over_udp(server, query)
        if answer.flags & dns.flags.TC or not _repeats(query, answer):
            answer = await _over_tcp(server, query)
    except (*_LOST, *_WRONG):
        return None
    useful = answer.rcode() in {dns.rcode.NOERROR, dns.rcode.NXDOMAIN}
    return answer if useful and _repeats(query, answer) else None


def _in_random_case(name: dns.name.Name) -> dns.name.Name:
    def mixed(label: bytes) -> bytes:
        bits = secrets.randbits(len(label) or 1)
        return bytes(
            c ^ 0x20 if chr(c).isalpha() and bits >> i & 1 else c for i, c in enumerate(label)
        )

    return dns.name.Name([mixed(label) for label in name.labels])


def _repeats(query: dns.message.Message, answer: dns.message.Message) -> bool:
    return answer.question[0].name.labels == query.question[0].name.labels


def _parsed(query: dns.message.Message, wire: bytes) -> dns.message.QueryMessage | None:
    """An answer to this question; None: something else, to be passed over."""
    try:
        answer = dns.message.from_wire(wire, ignore_trailing=True)
    except _WRONG:
        return None
    if isinstance(answer, dns.message.QueryMessage) and query.is_response(answer):
        return answer if answer.question else None
    return None


async def _over_udp(server: Server, query: dns.message.Message) -> dns.message.QueryMessage:
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with contextlib.ExitStack() as closing:
        raw = closing.enter_context(socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
        raw.connect(server)  # only this server's answers arrive
        async with await ConnectedUDPSocket.from_socket(raw) as udp:
            closing.pop_all()
            await udp.send(query.to_wire())
            while True:
                answer = _parsed(query, await udp.receive())
                if answer is not None:
                    return answer


async def _over_tcp(server: Server, query: dns.message.Message) -> dns.message.QueryMessage:
    wire = query.to_wire()
    async with await anyio.connect_tcp(*server) as tcp:
        await tcp.send(len(wire).to_bytes(2, "big") + wire)
        stream = BufferedByteReceiveStream(tcp)
        size = int.from_bytes(await stream.receive_exactly(2), "big")
        answer = _parsed(query, await stream.receive_exactly(size))
    if answer is None:
        raise dns.exception.FormError
    return answer
