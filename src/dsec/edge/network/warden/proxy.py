"""Connections that the warden looks into: those the filter sends it, and those to its explicit proxy.

Either says which host it is for, by TLS or by HTTP. That name must be allowed, and the address one
of the name's: an address alone may be shared by many names, a name alone can be lied about. Where an
address is allowed by itself, nothing has to be said. Then bytes are copied, or HTTP is relayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import anyio
import h11
from anyio.abc import SocketListener, SocketStream

from dsec.base.clock import Clock
from dsec.edge.network.warden.authority import (
    HTTP_PORT,
    HTTPS_PORT,
    Place,
    authority_of,
    parse_authority,
    place_and_resource,
)
from dsec.edge.network.warden.client_hello import Kind, MalformedHello, kind_of, read_hello
from dsec.edge.network.warden.denials import Denials
from dsec.edge.network.warden.guests import Flow, Guest, Guests
from dsec.edge.network.warden.http_relay import Connect, HttpRelay, Refusal, Route, Target, Tunnel
from dsec.edge.network.warden.messages import Credential
from dsec.edge.network.warden.places import Destination, DestinationOf, destination_of, peer_of
from dsec.edge.network.warden.reach import INSPECTED_PORTS, Address
from dsec.edge.network.warden.resolver import Refused, Resolver
from dsec.edge.network.warden.settings import Limits
from dsec.edge.network.warden.streams import BROKEN, Peekable, join, reset_on_close
from dsec.edge.network.warden.survival import survived
from dsec.edge.network.warden.upstream import AddressType, UpstreamFailed
from dsec.wire.sandbox import DenialReason

_ACCESS_DENIED = bytes((21, 3, 1, 0, 2, 2, 49))
"""A TLS alert, so that a client can say what happened."""
_MAX_PIECES = 256
"""In which a client's first bytes may come: each is looked at."""

_Handle = Callable[[Guest, Flow, Peekable, SocketStream], Awaitable[None]]


class Proxy:
    """Serves both kinds."""

    def __init__(  # noqa: PLR0913 - what it decides with
        self,
        guests: Guests,
        resolver: Resolver,
        denials: Denials,
        connect: Connect,
        clock: Clock,
        limits: Limits,
        destination: DestinationOf = destination_of,
    ) -> None:
        """Serve nobody yet.

        Args:
            guests: who may connect.
            resolver: which addresses a name has.
            denials: is told what was refused.
            connect: the way to servers.
            clock: for how long an address was given.
            limits: bounds.
            destination: where an inspected connection wants to go.
        """
        self._guests = guests
        self._resolver = resolver
        self._denials = denials
        self._connect = connect
        self._clock = clock
        self._limits = limits
        self._destination = destination
        self._open = 0

    async def serve_transparent(self, listener: SocketListener) -> None:
        """Serve connections the filter sends, until cancelled."""
        async with listener:
            await listener.serve(lambda stream: self._accept(stream, self._transparent))

    async def serve_explicit(self, listener: SocketListener) -> None:
        """Serve connections to the proxy's own port, until cancelled."""
        async with listener:
            await listener.serve(lambda stream: self._accept(stream, self._explicit))

    async def _accept(self, stream: SocketStream, handle: _Handle) -> None:
        flow = Flow()
        async with stream:
            guest = self._guests.at(peer_of(stream))
            if guest is None or not self._has_room(guest):
                reset_on_close(stream)
                return
            guest.flows.add(flow)
            self._open += 1
            ended = False
            try:
                with survived("a connection"), contextlib.suppress(*BROKEN, TimeoutError):
                    with flow.scope:
                        await handle(guest, flow, Peekable(stream), stream)
                    ended = not flow.scope.cancelled_caught
            finally:
                self._open -= 1
                guest.flows.discard(flow)
                if not ended:
                    reset_on_close(stream)

    def _has_room(self, guest: Guest) -> bool:
        limits = self._limits
        return len(guest.flows) < limits.connections and self._open < limits.all_connections

    # What the filter sends.

    async def _transparent(
        self, guest: Guest, flow: Flow, client: Peekable, stream: SocketStream
    ) -> None:
        destination = self._destination(stream)
        if destination is None or self._resolver.is_never(destination[0]):
            reset_on_close(stream)
            return
        await self._inspect(guest, flow, client, destination)

    async def _inspect(
        self, guest: Guest, flow: Flow, client: Peekable, destination: Destination
    ) -> None:
        """Look at the first bytes, decide, and carry the connection."""
        kind, names = await self._look(guest, client, destination)
        if kind == "http":
            await HttpRelay(
                client, self._route_to(guest, flow, destination), self._connect, self._limits
            ).run()
            return
        address, port = destination
        name, reason = await self._named(guest, names, destination)
        if reason is not None and not guest.allows_network(address, port):
            self._deny(guest, reason, destination, names[0] if names else "")
            if kind == "tls":
                await client.send(_ACCESS_DENIED)
            return
        flow.is_for(name, address, port)
        await self._carry(client, Target(host=name or "", addresses=(address,), port=port))

    async def _look(
        self, guest: Guest, client: Peekable, destination: Destination
    ) -> tuple[Kind, list[str]]:
        """What a connection speaks, and the names it may be for; nothing is taken from it."""
        data, kind, names = b"", None, None
        with anyio.move_on_after(self._limits.head_s):
            for _ in range(_MAX_PIECES):
                kind = kind_of(data)
                if kind == "tls":
                    names = self._names_of(guest, data, destination[0])
                if kind is not None and (kind != "tls" or names is not None):
                    break
                try:
                    data += await client.receive()
                except anyio.EndOfStream:
                    break
        client.unread(data)
        return kind or "other", names or []

    def _names_of(self, guest: Guest, data: bytes, address: Address) -> list[str] | None:
        """The name a hello has; without one, those the address was given for; None: wait for more."""
        try:
            hello = read_hello(data)
        except MalformedHello:
            return []
        if hello is None:
            return None
        if hello.server is not None:
            return [hello.server]
        return guest.given.names_of(address, self._clock.monotonic())

    async def _named(
        self, guest: Guest, names: list[str], destination: Destination
    ) -> tuple[str | None, DenialReason | None]:
        """The first of some names that opens a destination, or why none does."""
        reason: DenialReason = "malformed"
        for name in names:
            if not guest.allows_name(name, destination[1]):
                reason = "name"
            elif not await self._belongs(guest, name, destination[0]):
                reason = "host_mismatch"
            elif guest.allows_name(name, destination[1]):  # still, after waiting
                return name, None
        return None, reason

    async def _belongs(self, guest: Guest, name: str, address: Address) -> bool:
        """Whether an address is one of a name's: given for it, or now."""
        if guest.given.has(name, address, self._clock.monotonic()):
            return True
        if not guest.may_ask(name):
            return False
        try:
            kind: AddressType = "A" if address.version == 4 else "AAAA"
            found = await self._resolver.resolve(guest, name, kind)
        except (Refused, UpstreamFailed, OSError):
            return False
        return address in found.addresses

    def _deny(
        self, guest: Guest, reason: DenialReason, destination: Destination, name: str
    ) -> None:
        self._denials.note(
            guest.identity,
            reason,
            protocol="tcp",
            address=str(destination[0]),
            port=destination[1],
            name=name,
        )

    async def _carry(self, client: Peekable, target: Target) -> None:
        async with await self._connect(target) as server:
            await join(client, server, self._limits.idle_s)

    def _route_to(
        self, guest: Guest, flow: Flow, destination: Destination
    ) -> Callable[[h11.Request], Awaitable[Route]]:
        """For requests of a connection to a destination."""
        address, port = destination

        async def route(request: h11.Request) -> Route:
            if request.method == b"CONNECT":
                raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "not a proxy")
            place, resource = place_and_resource(request)
            if (place.port or HTTP_PORT) != port:
                raise Refusal(HTTPStatus.BAD_REQUEST, "for another port")
            named = place.address is None and await self._belongs(guest, place.host, address)
            return self._admit(guest, flow, place, resource, (address,), named=named)

        return route

    # The explicit proxy.

    async def _explicit(
        self, guest: Guest, flow: Flow, client: Peekable, _stream: SocketStream
    ) -> None:
        async def route(request: h11.Request) -> Route:
            if request.method == b"CONNECT":
                raise Tunnel(await self._tunnel(guest, flow, parse_authority(request.target)))
            place, resource = place_and_resource(request)
            addresses = await self._addresses(guest, place)
            named = place.address is None
            return self._admit(guest, flow, place, resource, addresses, named=named)

        target = await HttpRelay(client, route, self._connect, self._limits).run()
        if target is None:
            return
        if target.port in INSPECTED_PORTS:
            await self._inspect(guest, flow, client, (target.addresses[0], target.port))
        else:
            await self._carry(client, target)

    async def _tunnel(self, guest: Guest, flow: Flow, place: Place) -> Target:
        if place.port is None:
            raise Refusal(HTTPStatus.BAD_REQUEST, "no port")
        addresses = await self._addresses(guest, place)
        return self._open_to(guest, flow, place, place.port, addresses, ())

    async def _addresses(self, guest: Guest, place: Place) -> tuple[Address, ...]:
        """Where a host is. Raises Refusal."""
        address = place.address
        if address is not None:
            if self._resolver.is_never(address):
                raise self._refused(guest, "never", place, place.port or HTTP_PORT, address)
            return (address,)
        try:
            for kind in ("A", "AAAA"):
                found = await self._resolver.resolve(guest, place.host, kind)
                if found.addresses:
                    return found.addresses
        except Refused:
            raise Refusal(HTTPStatus.FORBIDDEN, "not allowed") from None
        except (UpstreamFailed, OSError):
            raise Refusal(HTTPStatus.BAD_GATEWAY, "no resolver answers") from None
        raise Refusal(HTTPStatus.BAD_GATEWAY, "no such host")

    # Both.

    def _admit(
        self,
        guest: Guest,
        flow: Flow,
        place: Place,
        resource: bytes,
        addresses: tuple[Address, ...],
        *,
        named: bool,
    ) -> Route:
        """Where a request goes, with its credentials if its host is who it says. Raises Refusal."""
        credentials = guest.credentials_of(place.host) if named else ()
        tls = any(credential.scheme == "https" for credential in credentials)
        port = place.port or HTTP_PORT
        if tls and port == HTTP_PORT:
            port = HTTPS_PORT
        if not named:
            addresses = self._allowed_alone(guest, place, port, addresses)
        target = self._open_to(guest, flow, place, port, addresses, credentials)
        if tls:
            target = Target(host=place.host, addresses=target.addresses, port=port, tls=True)
        authority = authority_of(place.host, port, tls=tls)
        return Route(target=target, resource=resource, authority=authority, credentials=credentials)

    def _allowed_alone(
        self, guest: Guest, place: Place, port: int, addresses: tuple[Address, ...]
    ) -> tuple[Address, ...]:
        """Those of addresses that need no name. Raises Refusal: none."""
        if allowed := tuple(each for each in addresses if guest.allows_network(each, port)):
            return allowed
        known = place.address is None and guest.allows_name(place.host, port)
        reason: DenialReason = "host_mismatch" if known else "name"
        if place.address is not None:
            reason = "rule"
        raise self._refused(guest, reason, place, port, addresses[0])

    def _open_to(
        self,
        guest: Guest,
        flow: Flow,
        place: Place,
        port: int,
        addresses: tuple[Address, ...],
        credentials: tuple[Credential, ...],
    ) -> Target:
        """Check a host at a port, and note what the connection is for. Raises Refusal."""
        name = place.host if place.address is None else None
        if name is None or not guest.allows_name(name, port):
            addresses = self._allowed_alone(guest, place, port, addresses)
        flow.is_for(name, addresses[0], port, credentials)
        return Target(host=place.host, addresses=addresses, port=port)

    def _refused(
        self, guest: Guest, reason: DenialReason, place: Place, port: int, address: Address
    ) -> Refusal:
        name = place.host if place.address is None else ""
        self._deny(guest, reason, (address, port), name)
        return Refusal(HTTPStatus.FORBIDDEN, "not allowed")
