"""What rules say, held against a decision about one packet at a time that knows no shortcuts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.base.errors import InvalidRequest, Unsupported
from dsec.edge.network import policy as policies
from dsec.edge.network.policy import (
    MAX_RULES,
    MAX_SPANS,
    Names,
    Policy,
    Service,
    Span,
    caveats,
    decides,
    flatten,
    narrows,
    parse,
)
from dsec.edge.network.spans import merged
from dsec.linux import network_filter

SERVICES = {
    "pypi": Service(name="pypi", keys=("tcp://index.test:443", "tcp://192.0.2.9:8080")),
    "npm": Service(name="npm", source="npm is not installed"),
}
ALL = (Span("icmp"), Span("tcp"), Span("udp"))


def read(*allowed: str, deny: tuple[str, ...] = ()) -> Policy:
    return parse(dict.fromkeys(allowed, True) | dict.fromkeys(deny, False), SERVICES)


def fits(spans: tuple[Span, ...], protocol: str, port: int) -> bool:
    return any(s.protocol == protocol and s.low <= port <= s.high for s in spans)


def at(policy: Policy, address: str, protocol: str = "tcp", port: int = 443) -> bool:
    """As the kernel does: the longest prefix of the flattened table."""
    where = ipaddress.ip_address(address)
    table = {n: s for n, s in flatten(policy).items() if n.version == where.version and where in n}
    longest = max(table, key=lambda network: network.prefixlen)
    return fits(table[longest], protocol, port)


# the grammar


@pytest.mark.parametrize(
    ("key", "network", "spans"),
    [
        ("10.0.0.0/8", "10.0.0.0/8", ALL),
        ("192.0.2.1", "192.0.2.1/32", ALL),
        ("2001:db8::/32", "2001:db8::/32", ALL),
        ("192.0.2.1:443", "192.0.2.1/32", (Span("tcp", 443, 443), Span("udp", 443, 443))),
        ("tcp://[2001:db8::1]:8000-9000", "2001:db8::1/128", (Span("tcp", 8000, 9000),)),
        ("udp://10.0.0.0/8", "10.0.0.0/8", (Span("udp"),)),
        ("icmp://10.0.0.0/8", "10.0.0.0/8", (Span("icmp"),)),
    ],
)
def test_keys_of_networks(key: str, network: str, spans: tuple[Span, ...]) -> None:
    (rule,) = read(key).networks
    assert (str(rule.network), rule.spans, rule.allowed) == (network, spans, True)
    assert not read(key).names


@pytest.mark.parametrize(
    ("key", "pattern", "spans"),
    [
        ("Example.ORG.", "example.org", ALL[1:]),
        ("*.example.org:443", "*.example.org", (Span("tcp", 443, 443), Span("udp", 443, 443))),
        ("tcp://bücher.example:80", "xn--bcher-kva.example", (Span("tcp", 80, 80),)),
        ("mirror.", "mirror", ALL[1:]),
        ("_x._tcp.example.org", "_x._tcp.example.org", ALL[1:]),
        ("*.org", "*.org", ALL[1:]),
    ],
)
def test_keys_of_names(key: str, pattern: str, spans: tuple[Span, ...]) -> None:
    (rule,) = read(key).names
    assert (rule.pattern, rule.spans) == (pattern, spans)
    assert not read(key).networks


def test_everywhere_is_all_networks_and_all_names() -> None:
    policy = read("tcp://*:443")
    assert {str(rule.network) for rule in policy.networks} == {"0.0.0.0/0", "::/0"}
    assert [rule.pattern for rule in policy.names] == ["*"]
    assert (at(policy, "192.0.2.1"), at(policy, "2001:db8::1", port=80)) == (True, False)


def test_a_service_is_what_its_node_says() -> None:
    policy = read("pypi")
    assert decides(policy.names, "index.test") == (Span("tcp", 443, 443),)
    assert at(policy, "192.0.2.9", port=8080)
    assert not at(policy, "192.0.2.9", port=443)
    assert policy.rules == {"pypi": True}


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("10.0.0.1/8", "the network is 10.0.0.0/8"),
        ("10.0.0.0/255.0.0.0", "10.0.0.0/8"),
        ("10.0.0.0/33", "2001:db8::/32"),
        ("1.2.3", "10.0.0.0/8"),
        ("::ffff:192.0.2.1", "as one, such as 192.0.2.1"),
        ("fe80::1%eth0", "no zone"),
        ("[2001:db8::]/32:5", r"\[2001:db8::/32\]:443"),
        ("[2001:db8::1", r"\[2001:db8::1\]:443"),
        ("https://example.org", "tcp://, udp:// or icmp://"),
        ("example.org/simple", "no path"),
        ("*example.org", r"as in \*\.example\.org"),
        ("a.*.org", "first label"),
        ("example.org:0", "1 to 65535"),
        ("example.org:70000", "1 to 65535"),
        ("example.org:9-8", "1 to 65535"),
        ("example.org:", "1 to 65535"),
        ("icmp://192.0.2.1:8", "no ports"),
        ("localhost", "known: npm, pypi"),
        ("pypi:443", "ports of its own"),
        ("", "example.org"),
        ("a..org", "example.org"),
        ("example.org\n", "example.org"),
        ("-a.org", "example.org"),
        ("example.123", "example.org"),
        ("x" * 301, "300 characters"),
    ],
)
def test_a_wrong_key_is_told_and_what_would_be_right(key: str, right: str) -> None:
    with pytest.raises(InvalidRequest, match=right) as caught:
        read(key)
    assert repr(key)[:80] in caught.value.message
    with pytest.raises(InvalidRequest):
        read(deny=(key,))


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read(text)
    except InvalidRequest as exc:
        assert repr(text) in exc.message or len(text) > 300


def test_too_much_is_refused() -> None:
    rules = {f"10.0.{n >> 8}.{n & 255}": True for n in range(MAX_RULES)}
    assert len(flatten(parse(rules, {}))) == MAX_RULES + 2
    with pytest.raises(InvalidRequest, match="at most 4096"):
        parse(rules | {"*": True}, {})
    assert MAX_SPANS == network_filter.MAX_SPANS
    for place in ("192.0.2.1", "example.org", "*.example.org", "*"):
        many = {f"tcp://{place}:{port}": True for port in range(1, 2 * MAX_SPANS, 2)}
        parse(many, {})
        with pytest.raises(InvalidRequest, match="17 separate ranges"):
            parse(many | {f"udp://{place}": True}, {})


def test_too_much_is_refused_without_being_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rules as may be, each to be carried into as many places as may be."""
    worked, merge = list[int](), merged

    def counted(spans: Iterable[Span]) -> tuple[Span, ...]:
        worked.append(len(given := [*spans]))
        return merge(given)

    monkeypatch.setattr(policies, "merged", counted)
    half = MAX_RULES // 2
    for around, below in (("10.0.0.0/8", "10.0.{}.{}"), ("*.a.test", "x{}-{}.a.test")):
        ports = {f"tcp://{around}:{2 * port + 1}": True for port in range(half)}
        places = {below.format(n >> 8, n & 255): True for n in range(half)}
        with pytest.raises(InvalidRequest, match="2048 separate ranges"):
            parse(ports | places, {})
    assert sum(worked) < 10 * MAX_RULES


def test_a_service_that_is_not_here_is_not_allowed_and_need_not_be_denied() -> None:
    with pytest.raises(Unsupported, match="npm is not installed"):
        read("npm")
    policy = read(deny=("npm",))
    assert caveats(policy, SERVICES) == ["network_rules: npm denies nothing: npm is not installed"]


def test_a_denied_name_among_everything_is_told() -> None:
    (said,) = caveats(read("*", deny=("evil.test",)), SERVICES)
    assert "evil.test" in said
    assert not caveats(read("example.org", deny=("evil.test", "10.0.0.0/8")), SERVICES)


# networks


def test_the_most_specific_that_fits_the_packet_decides() -> None:
    policy = read("10.0.0.0/8", "tcp://10.1.2.0/24:443", deny=("tcp://10.1.0.0/16",))
    assert at(policy, "10.9.9.9", port=80)
    assert not at(policy, "10.1.9.9")
    assert at(policy, "10.1.2.9")
    assert not at(policy, "10.1.2.9", port=80)
    assert at(policy, "10.1.2.9", "udp", 80), "a rule about tcp spoke of udp"
    assert at(policy, "10.1.2.9", "icmp", 0)
    assert not at(policy, "11.0.0.1")


def test_of_two_as_specific_the_denial_decides() -> None:
    policy = read("192.0.2.1", "192.0.2.0/24:1-100", deny=("192.0.2.1/32:443", "192.0.2.0/24:50"))
    assert not at(policy, "192.0.2.1")
    assert at(policy, "192.0.2.1", port=50)
    assert not at(policy, "192.0.2.7", port=50)
    assert at(policy, "192.0.2.7", port=51)


def test_a_rule_about_ipv6_says_nothing_of_ipv4() -> None:
    table = flatten(read("::/0"))
    assert table[IPv4Network("0.0.0.0/0")] == ()
    assert table[IPv6Network("::/0")] == ALL


ADDRESSES = st.integers(0, 15)
PORTS = st.integers(1, 6)
PROTOCOLS = st.sampled_from(["tcp", "udp", "icmp"])


@st.composite
def network_keys(draw: st.DrawFn) -> str:
    """Networks so small, and ports so few, that they meet."""
    scheme = draw(st.sampled_from(["", "tcp://", "udp://", "icmp://"]))
    length, value = draw(st.integers(0, 4)), draw(ADDRESSES)
    if draw(st.booleans()):
        place = str(IPv4Network(f"0.0.0.{value}/{28 + length}", strict=False))
        shown = place
    else:
        place = str(IPv6Network(f"2001:db8::{value:x}/{124 + length}", strict=False))
        shown = f"[{place}]"
    if draw(st.integers(0, 6)) == 0:
        place = shown = "*"
    if scheme == "icmp://" or draw(st.booleans()):
        return scheme + place
    low = draw(PORTS)
    return f"{scheme}{shown}:{low}-{draw(st.integers(low, 6))}"


def naive(rules: Mapping[str, bool], address: str, protocol: str, port: int) -> bool:
    """The sentence of the documentation, word by word, about one packet."""
    where = ipaddress.ip_address(address)
    fitting: list[tuple[int, bool]] = []
    for key, allowed in rules.items():
        scheme, _, rest = key.rpartition("://")
        place, _, ports = rest.rpartition(":") if "-" in rest else (rest, "", "")
        low, _, high = ports.partition("-")
        if scheme and scheme != protocol:
            continue
        if ports and (protocol == "icmp" or not int(low) <= port <= int(high)):
            continue
        if place != "*":
            network = ipaddress.ip_network(place.strip("[]"))
            if network.version != where.version or where not in network:
                continue
        fitting.append(
            (0 if place == "*" else ipaddress.ip_network(place.strip("[]")).prefixlen, allowed)
        )
    longest = max((length for length, _ in fitting), default=0)
    return bool(fitting) and all(allowed for length, allowed in fitting if length == longest)


RULES = st.dictionaries(network_keys(), st.booleans(), max_size=10)


@given(RULES, ADDRESSES, st.booleans(), PROTOCOLS, PORTS)
def test_flattened_rules_decide_as_each_packet_would(
    rules: dict[str, bool], value: int, four: bool, protocol: str, port: int
) -> None:
    address = str(IPv4Address(value) if four else IPv6Address(f"2001:db8::{value:x}"))
    assert at(parse(rules, {}), address, protocol, port) == naive(rules, address, protocol, port)


@given(RULES, RULES)
def test_narrowing_misses_nothing_of_networks(old: dict[str, bool], new: dict[str, bool]) -> None:
    before, after = parse(old, {}), parse(new, {})
    lost = any(
        at(before, address, protocol, port) and not at(after, address, protocol, port)
        for value in range(16)
        for address in (f"0.0.0.{value}", f"2001:db8::{value:x}")
        for protocol in ("tcp", "udp", "icmp")
        for port in (1, 3, 6)
    )
    assert narrows(before, after) or not lost
    assert not narrows(before, before)


# names


def test_the_longest_name_that_fits_decides() -> None:
    policy = read(
        "*.example.org", "a.b.example.org", "example.net", deny=("*.b.example.org", "x.example.org")
    )
    tcp_udp = (Span("tcp"), Span("udp"))
    for name, spans in {
        "example.org": (),
        "www.example.org": tcp_udp,
        "q.w.example.org": tcp_udp,
        "b.example.org": tcp_udp,
        "c.b.example.org": (),
        "d.c.b.example.org": (),
        "A.B.Example.Org.": tcp_udp,
        "x.example.org": (),
        "y.x.example.org": tcp_udp,
        "www.example.net": (),
        "notexample.org": (),
        "org": (),
        "": (),
        ".": (),
    }.items():
        assert decides(policy.names, name) == spans, name


def test_a_longer_name_that_does_not_fit_the_port_leaves_it_to_the_shorter() -> None:
    policy = read("tcp://*.example.org", "udp://www.example.org:53", deny=("www.example.org:80",))
    assert decides(policy.names, "www.example.org") == (
        Span("tcp", 0, 79),
        Span("tcp", 81, 65535),
        Span("udp", 53, 53),
    )


def test_what_everywhere_allows_opens_no_addresses_of_its_own() -> None:
    """Or a name that leads to a network that is denied would open it."""
    names = Names(read("*", "example.org:443", deny=("evil.test",)).names)
    assert names.decides("any.test") == ALL[1:]
    assert names.opens("any.test") == ()
    assert names.opens("example.org") == (Span("tcp", 443, 443), Span("udp", 443, 443))
    assert names.decides("evil.test") == ()


LABELS = st.sampled_from(["a", "b"])
DOMAINS = st.lists(LABELS, min_size=2, max_size=4).map(".".join)
NAME_KEYS = st.one_of(
    DOMAINS, DOMAINS.map("*.{}".format), DOMAINS.map("tcp://{}:1-2".format), st.just("*")
)


def naive_name(rules: Mapping[str, bool], qname: str, port: int) -> bool:
    fitting: list[tuple[tuple[int, int], bool]] = []
    for key, allowed in rules.items():
        pattern = key.removeprefix("tcp://").removesuffix(":1-2")
        exact = pattern == qname
        below = pattern.startswith("*") and qname.endswith(pattern[1:])
        if (exact or below) and (pattern == key or 1 <= port <= 2):
            fitting.append(((1 if exact else 0, len(pattern)), allowed))
    longest = max((rank for rank, _ in fitting), default=(0, 0))
    return bool(fitting) and all(allowed for rank, allowed in fitting if rank == longest)


@given(st.dictionaries(NAME_KEYS, st.booleans(), max_size=8), DOMAINS, st.integers(1, 4))
def test_names_decide_as_each_packet_would(rules: dict[str, bool], qname: str, port: int) -> None:
    spans = decides(parse(rules, {}).names, qname)
    assert fits(spans, "tcp", port) == naive_name(rules, qname, port)


@pytest.mark.parametrize(
    ("old", "new", "narrower"),
    [
        ({"a.test": True}, {"a.test": True, "b.test": True}, False),
        ({"a.test": True}, {"*.test": True}, False),
        ({"*.test": True}, {"a.test": True}, True),
        ({"a.test": True}, {"a.test:443": True}, True),
        ({"*.test": True}, {"*.test": True, "a.test": False}, True),
        ({"*": True}, {"*.test": True}, True),
        ({}, {}, False),
    ],
)
def test_narrowing_of_names(old: dict[str, bool], new: dict[str, bool], narrower: bool) -> None:
    assert narrows(parse(old, {}), parse(new, {})) is narrower


def test_the_module_says_what_it_offers() -> None:
    assert all(hasattr(policies, name) for name in policies.__all__)
