"""What sandboxes were denied, of late: like ones counted together, bounded for each sandbox."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

import msgspec

from dsec.linux.network_filter import IPPROTO, Denial
from dsec.wire.sandbox import DeniedTraffic

MAX_KINDS = 256
"""Of one sandbox; the one that was met longest ago makes room."""
_NAMES = {number: name for name, number in IPPROTO.items()} | {58: "icmp"}

_Kind = tuple[str, str, str, int, str]


class DeniedLog:
    """Of one sandbox. Kept in memory: an edge that starts again begins anew."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[_Kind, DeniedTraffic] = {}

    def add(self, events: Iterable[DeniedTraffic]) -> None:
        """Count them in."""
        for event in events:
            kind = (event.reason, event.protocol, event.address, event.port, event.name)
            known = self._kinds.pop(kind, None)
            if known is None and len(self._kinds) >= MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[kind] = event if known is None else _together(known, event)

    def events(self) -> list[DeniedTraffic]:
        """All that is known, what was met last at the end."""
        return list(self._kinds.values())


def _together(known: DeniedTraffic, event: DeniedTraffic) -> DeniedTraffic:
    count = known.count + event.count
    return msgspec.structs.replace(event, first_at=known.first_at, count=count)


def told(denial: Denial, at: float) -> DeniedTraffic:
    """A packet of the filter's report, in words."""
    return DeniedTraffic(
        reason=denial.reason,
        first_at=at,
        last_at=at,
        protocol=_NAMES.get(denial.protocol, str(denial.protocol)),
        address=str(_address(denial.address)),
        port=denial.port,
    )


def _address(packed: bytes) -> IPv4Address | IPv6Address:
    address = ip_address(packed)
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
