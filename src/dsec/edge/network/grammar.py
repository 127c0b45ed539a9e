"""One key of a rule, read: what it is about, and which ports of that. Pure.

The grammar is told in `policy`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network

from msgspec import Struct

from dsec.base.errors import InvalidRequest
from dsec.edge.network.spans import TOP, Protocol, Span, Spans

Network = IPv4Network | IPv6Network

EVERYWHERE = "*"
MAX_KEY = 300
MAX_NAME = 253
MAX_READ = 8192
"""Keys remembered: the sandboxes of a run have the same ones."""
PROTOCOLS: tuple[Protocol, ...] = ("tcp", "udp", "icmp")

_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC = re.compile(r"[0-9./]+")
_SERVICE = re.compile(r"[a-z][a-z0-9-]{0,62}")
_MAPPED = IPv6Network("::ffff:0:0/96")


class Key(Struct, frozen=True, kw_only=True):
    """What a key is about: a network, a name, a service or, with none of them, everywhere."""

    network: Network | None = None
    name: str = ""
    """In ASCII and lower case, without the final dot; `*.` before it: what is below it."""
    service: str = ""
    spans: Spans = ()


@lru_cache(maxsize=MAX_READ)
def read_key(key: str) -> Key:
    """Read a key.

    Raises:
        InvalidRequest: it is none; the message has it, and what would be right.
    """
    if len(key) > MAX_KEY:
        raise InvalidRequest(f"network rule {key[:80]!r}...: longer than {MAX_KEY} characters")
    scheme, slashes, rest = key.rpartition("://")
    protocol = _protocol(key, scheme) if slashes else None
    place, ports = _place_and_ports(key, rest)
    low, high = (0, TOP) if ports is None else _ports(key, protocol, ports)
    if place == EVERYWHERE:
        return Key(spans=_spans(protocol, low, high, pings=ports is None))
    if ":" in place or _NUMERIC.fullmatch(place):
        spans = _spans(protocol, low, high, pings=ports is None)
        return Key(network=_network(key, place), spans=spans)
    if is_service(place):
        return _service(key, place)
    return Key(name=_name(key, place), spans=_spans(protocol, low, high, pings=False))


def is_service(name: str) -> bool:
    """Whether a service may be called that."""
    return _SERVICE.fullmatch(name) is not None


def plain(name: str) -> str:
    """A name as it is compared: in lower case, without the final dot."""
    return name.lower().removesuffix(".")


def wrong(key: str, right: str) -> InvalidRequest:
    """The refusal of a key."""
    return InvalidRequest(f"network rule {key!r}: {right}", rule=key)


def _protocol(key: str, scheme: str) -> Protocol:
    if scheme in PROTOCOLS:
        return scheme
    raise wrong(key, "the protocol may be tcp://, udp:// or icmp://; without one it is tcp and udp")


def _place_and_ports(key: str, rest: str) -> tuple[str, str | None]:
    if not rest.startswith("["):  # more colons than one: IPv6, which has no port without brackets
        place, colon, ports = rest.partition(":") if rest.count(":") == 1 else (rest, "", "")
        return place, ports if colon else None
    place, closed, behind = rest[1:].partition("]")
    if not closed or ":" not in place or (behind and not behind.startswith(":")):
        raise wrong(key, "right would be [2001:db8::1]:443 or [2001:db8::/32]:443")
    return place, behind[1:] if behind else None


def _ports(key: str, protocol: Protocol | None, text: str) -> tuple[int, int]:
    match = _PORTS.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not 1 <= low <= high <= TOP:
        raise wrong(key, "ports are 1 to 65535, one (:443) or a range (:8000-9000)")
    if protocol == "icmp":
        raise wrong(key, "icmp has no ports")
    return low, high


@lru_cache(maxsize=1024)
def _spans(protocol: Protocol | None, low: int, high: int, *, pings: bool) -> Spans:
    if protocol is not None:
        return (Span(protocol, low, high),)
    spans = (Span("tcp", low, high), Span("udp", low, high))
    return (Span("icmp"), *spans) if pings else spans


def _network(key: str, place: str) -> Network:
    kind: type[Network] = IPv6Network if ":" in place else IPv4Network
    if "%" in place:
        raise wrong(key, "an address has no zone here")
    try:
        network = kind(place)
    except ValueError as exc:
        raise wrong(key, _right_network(kind, place, exc)) from None
    if "/" in place and not place.rpartition("/")[2].isdecimal():
        raise wrong(key, f"write the prefix as a length: {network}")
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        raise wrong(key, "write an IPv4 address as one, such as 192.0.2.1")
    return network


def _right_network(kind: type[Network], place: str, problem: ValueError) -> str:
    try:
        return f"the network is {kind(place, strict=False)}"
    except ValueError:
        return f"{problem}; right would be 10.0.0.0/8 or 2001:db8::/32"


def _service(key: str, place: str) -> Key:
    if key != place:
        raise wrong(key, f"a service has ports of its own: write {place}, or {place}. for a host")
    return Key(service=place)


def _name(key: str, place: str) -> str:
    below, rest = ("*.", place[2:]) if place.startswith("*.") else ("", place)
    if "*" in rest:
        raise wrong(key, "a * stands alone or as the whole first label, as in *.example.org")
    if "/" in rest:
        raise wrong(key, "a name has no path, as in example.org:443")
    name = _ascii(key, rest)
    labels = name.split(".")
    if len(name) > MAX_NAME or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdecimal():
        raise wrong(key, "right would be a name such as example.org, an address, or a service")
    return below + name


def _ascii(key: str, text: str) -> str:
    if text.isascii():
        return plain(text)
    import idna  # here: few names need it, and its tables are large

    try:
        return plain(idna.encode(text, uts46=True).decode())
    except idna.IDNAError as exc:
        raise wrong(key, f"no name: {exc}") from None
