"""Addresses no sandbox reaches, whatever its rules say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network

Network = IPv4Network | IPv6Network

HERE = ("0.0.0.0/8", "127.0.0.0/8", "::/96")
"""Unspecified, loopback, and IPv4 in the abandoned notation of IPv6."""
LINK = ("169.254.0.0/16", "fe80::/10", "fec0::/10")
"""What is on a link alone; most clouds' metadata too."""
MANY = ("224.0.0.0/4", "240.0.0.0/4", "ff00::/8")
"""Multicast, reserved, broadcast."""
METADATA = (
    "168.63.129.16/32",  # Azure's host agent
    "100.100.100.200/32",  # Alibaba
    "192.0.0.192/32",  # Oracle, classic
    "fd00:ec2::/64",  # Amazon: metadata, resolver, time
    "fd20:ce::254/128",  # Google
    "fd00:42::42/128",  # Scaleway
)
"""Of clouds, where it is not link-local."""
TUNNELS = ("2001::/32",)
"""Teredo hides an IPv4 address where no prefix finds it."""
_NAT64 = int(ip_network("64:ff9b::/96").network_address)
_6TO4 = int(ip_network("2002::/16").network_address)


def never(*more: Iterable[Network]) -> tuple[Network, ...]:
    """All of them, without those inside others, and their disguises as IPv6 addresses.

    IPv4 as `::ffff:a.b.c.d` is not among them: on the wire it is refused altogether, and in the
    filter's maps that is how IPv4 is written.

    Args:
        more: the node's own: its pools, its addresses, the control plane's.
    """
    told = (ip_network(text) for text in (*HERE, *LINK, *MANY, *METADATA, *TUNNELS))
    found = [*told, *(each for group in more for each in group)]
    four = list(collapse_addresses(each for each in found if isinstance(each, IPv4Network)))
    six = [each for each in found if isinstance(each, IPv6Network)]
    disguised = [other for each in four for other in _disguises(each)]
    return (*four, *collapse_addresses([*six, *disguised]))


def _disguises(network: IPv4Network) -> Iterator[IPv6Network]:
    """Where translators (NAT64) and tunnels (6to4) of the network would take a packet to it."""
    address = int(network.network_address)
    yield IPv6Network((_NAT64 | address, 96 + network.prefixlen))
    yield IPv6Network((_6TO4 | address << 80, 16 + network.prefixlen))
