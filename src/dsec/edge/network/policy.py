"""What network rules say: parsed from their strings, and flattened for the kernel. Pure.

A rule's key is one of

    10.0.0.0/8                an address or network, IPv4 or IPv6
    example.org               a name, alone
    *.example.org             every name below it, at any depth, not itself
    pypi                      a named service of this node: `services`
    *                         everywhere

with, before it, a protocol (`tcp://`, `udp://`, `icmp://`; without: tcp and udp, and for addresses
icmp), and, after it, a port or a range (`:443`, `:8000-9000`; IPv6 in brackets then). A service has
ports of its own. A word without a dot is a service; `mirror.` is the name. The value says whether
that is allowed. The most specific rule that fits a packet decides: of networks the longest prefix,
of names the longest; of two as long the denial. What no rule allows is denied, and some addresses
are denied whatever rules say: the node, the other sandboxes, link-local (cloud metadata), loopback,
multicast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Network

from msgspec import Struct, field

from dsec.base.errors import InvalidRequest, Unsupported
from dsec.edge.network.grammar import EVERYWHERE, Key, Network, plain, read_key, wrong
from dsec.edge.network.spans import Protocol, Span, Spans, merged, within, without

__all__ = [
    "MAX_RULES",
    "MAX_SPANS",
    "NameRule",
    "Names",
    "Network",
    "NetworkRule",
    "Policy",
    "Protocol",
    "Service",
    "Span",
    "caveats",
    "decides",
    "flatten",
    "narrows",
    "parse",
]

MAX_RULES = 4096
MAX_SPANS = 16
"""Of one address: what the kernel can be told (`dsec.linux.network_filter`)."""
ALL4, ALL6 = IPv4Network("0.0.0.0/0"), IPv6Network("::/0")
_ANYONE = "anyone-"
"""Stands for names that no rule names: no label of a rule ends like that."""


class NameRule(Struct, frozen=True, kw_only=True):
    """A name or a wildcard, in lower case, without the final dot. `*`: every name."""

    pattern: str
    spans: tuple[Span, ...]
    allowed: bool = True


class NetworkRule(Struct, frozen=True, kw_only=True):
    """A network and what of it a rule is about."""

    network: Network
    spans: tuple[Span, ...]
    allowed: bool = True


class Policy(Struct, frozen=True, kw_only=True):
    """What all rules of a sandbox say together."""

    networks: tuple[NetworkRule, ...] = ()
    names: tuple[NameRule, ...] = ()
    rules: dict[str, bool] = field(default_factory=dict)
    """As they were given."""


class Service(Struct, frozen=True, kw_only=True):
    """What the word for it stands for on this node."""

    name: str
    keys: tuple[str, ...] = ()
    """Of the same grammar, none of them a service; empty: this node knows no such service."""
    source: str = ""
    """Where that was found, or why it was not, in words."""


def parse(rules: Mapping[str, bool], services: Mapping[str, Service]) -> Policy:
    """Read the rules of a sandbox.

    Args:
        rules: key -> whether that is allowed.
        services: what this node knows by name.

    Raises:
        InvalidRequest: a key is wrong, there are too many, or they cut the ports of an address
            into too many ranges; the message has the key.
        Unsupported: a service is allowed that this node does not know.
    """
    if len(rules) > MAX_RULES:
        raise InvalidRequest(f"{len(rules)} network rules; at most {MAX_RULES}", limit=MAX_RULES)
    networks: list[NetworkRule] = []
    names: list[NameRule] = []
    for given, allowed in rules.items():
        for key in _meant(given, services, allowed=allowed):
            networks += _network_rules(key, allowed=allowed)
            names += _name_rules(key, allowed=allowed)
    policy = Policy(networks=tuple(networks), names=tuple(names), rules=dict(rules))
    _check_spans(policy)
    return policy


def caveats(policy: Policy, services: Mapping[str, Service]) -> list[str]:
    """What rules do not do, though it may look so, in words for the caller."""
    said = [
        f"network_rules: {name} denies nothing: {services[name].source}"
        for name, allowed in policy.rules.items()
        if not allowed and name in services and not services[name].keys
    ]
    open_to_all = any(rule.allowed and rule.network in (ALL4, ALL6) for rule in policy.networks)
    denied = sorted({rule.pattern for rule in policy.names if not rule.allowed} - {EVERYWHERE})
    if open_to_all and denied:
        said.append(
            f"network_rules: {', '.join(denied)}: denied by the name alone, since everything is "
            "allowed: whoever knows an address of it reaches that"
        )
    return said


def _meant(given: str, services: Mapping[str, Service], *, allowed: bool) -> Iterator[Key]:
    key = read_key(given)
    if not key.service:
        yield key
        return
    service = services.get(key.service)
    if service is None:
        known = ", ".join(sorted(services)) or "none"
        raise wrong(given, f"no such service; known: {known}. A name has a dot: {given}.")
    if allowed and not service.keys:
        raise Unsupported(f"network rule {given!r}: {service.source}", rule=given)
    yield from map(read_key, service.keys)


def _network_rules(key: Key, *, allowed: bool) -> list[NetworkRule]:
    if key.name:
        return []
    networks = (ALL4, ALL6) if key.network is None else (key.network,)
    return [NetworkRule(network=each, spans=key.spans, allowed=allowed) for each in networks]


def _name_rules(key: Key, *, allowed: bool) -> list[NameRule]:
    if key.network is not None:
        return []
    spans = key.spans
    if not key.name and len(spans) > 1:  # of names, pings are only what is said of them alone
        spans = tuple(span for span in spans if span.protocol != "icmp")
    return [NameRule(pattern=key.name or EVERYWHERE, spans=spans, allowed=allowed)]


def _check_spans(policy: Policy) -> None:
    """Check each place after those around it: what is too much is not carried into all below it."""
    for network, spans in _flattened(policy):
        _check_one(str(network), spans)
    names = Names(policy.names)
    for pattern in sorted({rule.pattern for rule in policy.names}, key=_breadth):
        _check_one(pattern, names.decides(_example(pattern)))


def _breadth(pattern: str) -> tuple[int, bool]:
    return pattern.count("."), EVERYWHERE not in pattern


def _check_one(place: str, spans: Spans) -> None:
    if len(spans) > MAX_SPANS:
        raise InvalidRequest(
            f"network rule {place!r}: all rules together leave {len(spans)} separate ranges of "
            f"ports of it; at most {MAX_SPANS}",
            rule=place,
            limit=MAX_SPANS,
        )


# networks


def flatten(policy: Policy) -> dict[Network, Spans]:
    """What is allowed of the addresses whose longest prefix each one is.

    Both families have their whole, so that every address has a value of its own family: an IPv4
    address is not to be found below an IPv6 network it is mapped into.
    """
    return dict(_flattened(policy))


def _flattened(policy: Policy) -> Iterator[tuple[Network, Spans]]:
    table: dict[Network, Spans] = {}
    for network, above, here in _nested(_by_network(policy.networks)):
        table[network] = _decided(() if above is None else table[above], here)
        yield network, table[network]


def _decided(above: Spans, here: _Said) -> Spans:
    allowed = merged([*above, *here.allowed]) if here.allowed else above
    return without(allowed, here.denied) if here.denied else allowed


class _Said:
    """What rules say of one place, and no other."""

    __slots__ = ("allowed", "denied")

    def __init__(self) -> None:
        self.allowed: list[Span] = []
        self.denied: list[Span] = []

    def add(self, spans: Spans, *, allowed: bool) -> None:
        (self.allowed if allowed else self.denied).extend(spans)


def _by_network(rules: Iterable[NetworkRule]) -> dict[Network, _Said]:
    said: dict[Network, _Said] = {ALL4: _Said(), ALL6: _Said()}
    for rule in rules:
        said.setdefault(rule.network, _Said()).add(rule.spans, allowed=rule.allowed)
    return said


def _nested(said: Mapping[Network, _Said]) -> Iterator[tuple[Network, Network | None, _Said]]:
    """Each network after the smallest one around it."""
    around: list[tuple[int, int, Network]] = []  # version, last address, network
    for version, first, prefix, network in sorted(map(_placed, said)):
        while around and (around[-1][0] != version or around[-1][1] < first):
            around.pop()
        yield network, around[-1][2] if around else None, said[network]
        last = first | ((1 << (network.max_prefixlen - prefix)) - 1)
        around.append((version, last, network))


def _placed(network: Network) -> tuple[int, int, int, Network]:
    return network.version, int(network.network_address), network.prefixlen, network


# names


def decides(names: Iterable[NameRule], qname: str) -> Spans:
    """What rules allow of a name, as by `Names`."""
    return Names(names).decides(qname)


class Names:
    """Rules about names, found by the name."""

    def __init__(self, names: Iterable[NameRule]) -> None:
        self._said: dict[str, _Said] = {}
        for rule in names:
            said = self._said.setdefault(rule.pattern, _Said())
            said.add(rule.spans, allowed=rule.allowed)

    def decides(self, qname: str) -> Spans:
        """What is allowed of a name; nothing: it is not to be answered."""
        spans: Spans = ()
        for said in self._fitting(plain(qname)):
            spans = _decided(spans, said)
        return spans

    def opens(self, qname: str) -> Spans:
        """What of a name's addresses is allowed because of the name itself.

        What `*` allows is allowed of addresses already, where no rule about a network denies it.
        """
        spans: Spans = ()
        for said in self._fitting(plain(qname), everywhere=False):
            spans = _decided(spans, said)
        return spans

    def _fitting(self, name: str, *, everywhere: bool = True) -> Iterator[_Said]:
        """The least specific first."""
        labels = name.split(".")
        below = ("*." + ".".join(labels[at:]) for at in range(len(labels) - 1, 0, -1))
        patterns = ((EVERYWHERE,) if everywhere else ()), below, (name,)
        for pattern in (each for group in patterns for each in group):
            if said := self._said.get(pattern):
                yield said


def _example(pattern: str) -> str:
    """A name that a pattern fits, and no longer one does."""
    return pattern.replace("*", _ANYONE)


# changes


def narrows(old: Policy, new: Policy) -> bool:
    """Whether something that was allowed is not any more.

    May say so of a network whose addresses other rules speak of to the last one.
    """
    return _networks_narrow(old, new) or _names_narrow(old, new)


def _networks_narrow(old: Policy, new: Policy) -> bool:
    before, after = flatten(old), flatten(new)
    every = {network: _Said() for network in before | after}
    was: dict[Network, Spans] = {}
    now: dict[Network, Spans] = {}
    for network, above, _ in _nested(every):
        was[network] = before[network] if network in before else was[above or network]
        now[network] = after[network] if network in after else now[above or network]
        if not within(was[network], now[network]):
            return True
    return False


def _names_narrow(old: Policy, new: Policy) -> bool:
    before, after = Names(old.names), Names(new.names)
    patterns = {rule.pattern for rule in old.names + new.names}
    examples = map(_example, patterns)
    return any(not within(before.decides(name), after.decides(name)) for name in examples)
