"""Whether a name, an address, a port may be reached by what a sandbox's rules say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from dsec.edge.network.policy import NameRule, Network, NetworkRule, Span
from dsec.edge.network.spans import merged
from dsec.edge.network.warden.messages import Reach
from dsec.linux.network_filter import IPPROTO, MAX_SPANS, PortSpan

Address = IPv4Address | IPv6Address
INSPECTED_PORTS = (80, 443)
"""Of TCP: what goes there has to say which host it is for."""

PRIVATE: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        "10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "198.18.0.0/15",
        "fc00::/7", "64:ff9b::/96", "2002::/16",
    )
)  # fmt: skip
"""Somebody's inside, or a way to write such an address as another: a public name that points there
is not to be followed by itself."""
MAPPED: Network = ip_network("::ffff:0:0/96")
"""IPv4 written as IPv6: no name has such an address."""


def within(address: Address, networks: Iterable[Network]) -> bool:
    """Whether an address is in one of some networks."""
    return any(address in network for network in networks)


def network_rules(reaches: Iterable[Reach]) -> tuple[NetworkRule, ...]:
    """Network rules from their text. Raises ValueError."""
    return tuple(
        NetworkRule(network=ip_network(each.network), spans=each.spans, allowed=each.allowed)
        for each in reaches
    )


def fits(spans: Iterable[Span], port: int) -> bool:
    """Whether a TCP port is in one of some spans."""
    return any(span.protocol == "tcp" and span.low <= port <= span.high for span in spans)


def network_allows(rules: Iterable[NetworkRule], address: Address, port: int | None) -> bool:
    """Whether an address may be reached by itself, at a TCP port or (None) at any of its ports."""
    best, allowed = -1, False
    for rule in rules:
        if address not in rule.network or (port is not None and not fits(rule.spans, port)):
            continue
        length = rule.network.prefixlen
        if length > best or (length == best and not rule.allowed):
            best, allowed = length, rule.allowed
    return allowed


def wildcard_of(names: Sequence[NameRule], name: str) -> str | None:
    """The wildcard that alone allows a name; None if it is named itself, or everything is allowed."""
    best = ""
    for rule in names:
        if rule.pattern == name:
            return None
        if rule.pattern.startswith("*.") and name.endswith(rule.pattern[1:]):
            best = max(best, rule.pattern, key=len)
    return best or None


def port_spans(spans: Iterable[Span]) -> tuple[PortSpan, ...]:
    """Spans as the kernel takes them: disjoint, in order, web ports inspected, at most MAX_SPANS.

    Cut at the web ports there may be four more than a rule was allowed; what is too much is not
    reached.
    """
    result: list[PortSpan] = []
    for span in merged(spans):
        result += _inspected(span.low, span.high) if span.protocol == "tcp" else [_plain(span)]
    return tuple(result[:MAX_SPANS])


def _plain(span: Span) -> PortSpan:
    return PortSpan(IPPROTO[span.protocol], span.low, span.high)


def _tcp(low: int, high: int, *, inspect: bool = False) -> PortSpan:
    return PortSpan(IPPROTO["tcp"], low, high, inspect)


def _inspected(low: int, high: int) -> list[PortSpan]:
    pieces: list[PortSpan] = []
    for port in INSPECTED_PORTS:
        if low <= port <= high:
            if low < port:
                pieces.append(_tcp(low, port - 1))
            pieces.append(_tcp(port, port, inspect=True))
            low = port + 1
    if low <= high:
        pieces.append(_tcp(low, high))
    return pieces


def as_address(text: str) -> Address | None:
    """An address from its text, or None; a zone is none of ours."""
    if "%" in text:
        return None
    try:
        return ip_address(text)
    except ValueError:
        return None
