"""The sandboxes of the node as the warden knows them: by their addresses, with what they may reach.

An idle one costs what it was assigned. What narrows, narrows here: connections whose host or address
is no longer allowed are cut before the assignment is acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio

from dsec.base.clock import Clock
from dsec.edge.network.policy import NameRule, Names, NetworkRule, Span
from dsec.edge.network.warden.given import Given
from dsec.edge.network.warden.messages import Assign, Credential, HeldName
from dsec.edge.network.warden.rates import Questions
from dsec.edge.network.warden.reach import (
    Address,
    as_address,
    fits,
    network_allows,
    network_rules,
)
from dsec.edge.network.warden.settings import Limits


class KernelNames(Protocol):
    """The `names` maps of the slots' filters."""

    async def add(self, pins: str, held: Sequence[HeldName]) -> None:
        """Let a slot reach some addresses for a time; replaces what it says of these.

        Raises:
            OSError: there is no such map (any more).
        """
        ...


class Flow:
    """One connection of a sandbox through the proxy, and what it is for."""

    __slots__ = ("address", "credentials", "name", "port", "scope")

    def __init__(self) -> None:
        """Begin with a connection that is for nothing yet."""
        self.scope = anyio.CancelScope()
        self.name: str | None = None
        self.address: Address | None = None
        self.port = 0
        self.credentials: tuple[Credential, ...] = ()

    def is_for(
        self,
        name: str | None,
        address: Address,
        port: int,
        credentials: tuple[Credential, ...] = (),
    ) -> None:
        """Say what it is for now, and which credentials it has used."""
        self.name, self.address, self.port = name, address, port
        self.credentials = credentials


class Guest:
    """One sandbox."""

    __slots__ = (
        "_given",
        "_limits",
        "_names",
        "_questions",
        "address4",
        "address6",
        "dns_connections",
        "flows",
        "names",
        "networks",
        "pins",
        "sandbox",
        "secrets",
    )

    def __init__(self, assign: Assign, limits: Limits) -> None:
        """Know what it is assigned. Raises ValueError: an address or network is none."""
        self._limits = limits
        self._given: Given | None = None
        self._questions: Questions | None = None
        self.flows: set[Flow] = set()
        self.dns_connections = 0
        self.sandbox = assign.sandbox
        self.address4 = canonical(assign.address4)
        self.address6 = canonical(assign.address6) if assign.address6 else ""
        self.take(assign)

    def take(self, assign: Assign) -> None:
        """Replace what it may reach. Raises ValueError: a network is none, nothing changed."""
        networks = network_rules(assign.networks)
        self.pins = assign.pins
        self.names: tuple[NameRule, ...] = assign.names
        self.networks: tuple[NetworkRule, ...] = networks
        self.secrets = assign.secrets
        self._names: Names | None = None
        if self._given is not None:
            self._given.keep(self.may_ask)
        for flow in self.flows:
            if not self.still_allows(flow):
                flow.scope.cancel()

    @property
    def identity(self) -> tuple[str, str]:
        """For `Denials.note`."""
        return self.sandbox, self.address4

    @property
    def given(self) -> Given:
        """What it was given for names."""
        if self._given is None:
            self._given = Given(self._limits.given_names)
        return self._given

    def questions(self, now: float) -> Questions:
        """What it has asked lately."""
        if self._questions is None:
            self._questions = Questions(self._limits, now)
        return self._questions

    def held(self, now: float) -> tuple[HeldName, ...]:
        """What it was given and may still reach."""
        return self._given.held(self.opened_by, now) if self._given is not None else ()

    def may_ask(self, name: str) -> bool:
        """Whether a name is answered."""
        return self._rules.decides(name) != ()

    def opened_by(self, name: str) -> tuple[Span, ...]:
        """Where the addresses of a name may be reached because of it, whatever they are."""
        return self._rules.opens(name)

    @property
    def _rules(self) -> Names:
        if self._names is None:
            self._names = Names(self.names)
        return self._names

    def allows_name(self, name: str, port: int) -> bool:
        """Whether a name may be reached at a TCP port."""
        return fits(self.opened_by(name), port)

    def allows_network(self, address: Address, port: int | None) -> bool:
        """Whether an address may be reached by itself."""
        return network_allows(self.networks, address, port)

    def credentials_of(self, name: str) -> tuple[Credential, ...]:
        """The headers that are set on requests to a host."""
        return tuple(secret for secret in self.secrets if secret.host == name)

    def still_allows(self, flow: Flow) -> bool:
        """Whether what a connection is for is still allowed."""
        if flow.address is None:
            return True
        if not {_kind(each) for each in flow.credentials} <= {_kind(each) for each in self.secrets}:
            return False
        if flow.name is not None and self.allows_name(flow.name, flow.port):
            return True
        return self.allows_network(flow.address, flow.port)

    def cut_all(self) -> None:
        """End all its connections."""
        for flow in self.flows:
            flow.scope.cancel()


class Guests:
    """All of them."""

    def __init__(self, kernel: KernelNames, limits: Limits, clock: Clock) -> None:
        """Know nobody yet.

        Args:
            kernel: is told the addresses of names.
            limits: bounds of each.
            clock: for how long.
        """
        self._kernel = kernel
        self._limits = limits
        self._clock = clock
        self._by_address: dict[str, Guest] = {}

    def at(self, address: str) -> Guest | None:
        """Who has an address, as the kernel writes it."""
        return self._by_address.get(address)

    async def assign(self, assign: Assign) -> tuple[HeldName, ...]:
        """Replace what the sandbox at some addresses may reach; in force on return.

        Returns:
            What it was given and may still reach; its map has it.

        Raises:
            ValueError: an address or network is none; nothing changed.
        """
        known = self._by_address.get(canonical(assign.address4))
        if known is not None and known.sandbox == assign.sandbox:
            known.take(assign)
            return await self.refill(known.address4)
        guest = Guest(assign, self._limits)
        self.forget(guest.address4)
        self._by_address[guest.address4] = guest
        if guest.address6:
            self._by_address[guest.address6] = guest
        return ()

    async def refill(self, address4: str) -> tuple[HeldName, ...]:
        """Put what a sandbox holds into its map again; returns it. Nothing if it is not known."""
        guest = self._by_address.get(canonical(address4))
        held = guest.held(self._clock.monotonic()) if guest is not None else ()
        if guest is not None and held:
            await self._kernel.add(guest.pins, held)
        return held

    def forget(self, address4: str) -> None:
        """Know a sandbox no longer, and end its connections. Harmless if it is not known."""
        guest = self._by_address.pop(canonical(address4), None)
        if guest is not None:
            self._by_address.pop(guest.address6, None)
            guest.cut_all()

    async def give(
        self, guest: Guest, name: str, addresses: Sequence[Address], ttl_s: float
    ) -> None:
        """Let a sandbox reach a name's addresses; the kernel knows on return.

        Raises:
            OSError: its map is gone.
        """
        now = self._clock.monotonic()
        guest.given.add(name, addresses, now + ttl_s)
        held = guest.given.held(guest.opened_by, now, frozenset(addresses))
        if held:
            await self._kernel.add(guest.pins, held)


def _kind(credential: Credential) -> tuple[str, str]:
    """What stays when its value rotates."""
    return credential.host, credential.header.lower()


def canonical(text: str) -> str:
    """An address as the kernel writes it. Raises ValueError."""
    address = as_address(text)
    if address is None:
        raise ValueError(f"no address: {text!r}")
    return str(address)
