"""Which addresses slots have: pools that nobody else uses, and the numbers in them. Pure."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import chain

from msgspec import Struct

from dsec.base.errors import Conflict

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

FIRST_SLOT = 16
"""Those below are the router's: 1 is the gateway, 2 the host's end of the uplink."""
DEFAULT4 = IPv4Network("100.96.0.0/11")
"""Upper part of what carriers may use between them and their customers; each edge takes a /16."""
POOL4_LENGTH, POOL6_LENGTH = 16, 64
_ULA = IPv6Network("fd64:5ec::/32")
MIN_POOL4_LENGTH, MAX_POOL4_LENGTH = 8, 24


class Pools(Struct, frozen=True, kw_only=True):
    """Where the addresses of an edge's slots are from."""

    four: IPv4Network
    six: IPv6Network | None
    """None = this host has no IPv6."""

    @property
    def networks(self) -> tuple[Network, ...]:
        """One or two."""
        return (self.four,) if self.six is None else (self.four, self.six)

    @property
    def capacity(self) -> int:
        """Slots that have an address; the last one is broadcast."""
        return self.four.num_addresses - FIRST_SLOT - 1

    @property
    def gateways(self) -> tuple[Address, ...]:
        """The router's own addresses, in the slots' eyes."""
        return tuple(network[1] for network in self.networks)

    def of(self, number: int) -> tuple[Address, ...]:
        """Addresses of a slot.

        Raises:
            ValueError: there is no such number.
        """
        if not 0 <= number < self.capacity:
            raise ValueError(f"no slot {number} in {self.four}")
        return tuple(network[FIRST_SLOT + number] for network in self.networks)


class Numbers:
    """Numbers of slots. One that was used rests as long as it can: others have it in mind still."""

    def __init__(self, capacity: int, first: int = 0) -> None:
        """Start at some number, so that a restarted edge does not begin with those just used."""
        self._fresh = chain(range(first, capacity), range(first))
        self._rested: deque[int] = deque()
        self._used: set[int] = set()

    def __len__(self) -> int:
        return len(self._used)

    def take(self) -> int:
        """One that nobody has.

        Raises:
            IndexError: there is none.
        """
        number = next((each for each in self._fresh if each not in self._used), None)
        while number is None or number in self._used:  # a claimed one may have rested twice
            number = self._rested.popleft()
        self._used.add(number)
        return number

    def claim(self, number: int) -> None:
        """One that a slot of an earlier run of the edge has. Before any is taken."""
        self._used.add(number)

    def give_back(self, number: int) -> None:
        """Nothing of its slot is left."""
        if number in self._used:
            self._used.discard(number)
            self._rested.append(number)


def candidates4(configured: IPv4Network | None) -> Iterator[IPv4Network]:
    """Pools to try, best first: the one that was configured, or each part of the default.

    Raises:
        Conflict: it is too small or absurdly large.
    """
    if configured is None:
        yield from DEFAULT4.subnets(new_prefix=POOL4_LENGTH)
        return
    if not MIN_POOL4_LENGTH <= configured.prefixlen <= MAX_POOL4_LENGTH:
        raise Conflict(
            f"the pool {configured} must be a /{MIN_POOL4_LENGTH} to /{MAX_POOL4_LENGTH}"
        )
    yield configured


def candidates6(configured: IPv6Network | None, owner: str) -> Iterator[IPv6Network]:
    """Pools to try: the one that was configured, or some of an owner's own.

    Args:
        configured: at least a /112.
        owner: whoever has it, in a text that no other has.
    """
    if configured is not None:
        yield configured
        return
    spread = POOL6_LENGTH - _ULA.prefixlen
    for attempt in range(8):
        digest = hashlib.sha256(f"{attempt} {owner}".encode()).digest()
        part = int.from_bytes(digest[: spread // 8]) << (128 - POOL6_LENGTH)
        yield IPv6Network((int(_ULA.network_address) | part, POOL6_LENGTH))


def overlapping(network: Network, others: Sequence[Network]) -> Network | None:
    """The first of others that shares an address with a network; a default route is none."""
    return next(
        (
            other
            for other in others
            if other.version == network.version and other.prefixlen and other.overlaps(network)
        ),
        None,
    )


def mac_of(owner: str) -> str:
    """A hardware address, locally administered, always the same for a text."""
    digest = hashlib.sha256(owner.encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *digest[:5]))
