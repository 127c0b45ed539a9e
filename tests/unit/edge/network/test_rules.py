from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network

from dsec.edge.network.pools import Pools
from dsec.edge.network.rules import advice_on, dropping_forwards, host_rules, no_rules, router_rules

FOUR = IPv4Network("100.96.0.0/16")
BOTH = Pools(four=FOUR, six=IPv6Network("fd64:5ec::/64"))

DOCKER = """
table ip filter {
\tchain INPUT {
\t\ttype filter hook input priority filter; policy drop;
\t}
\tchain FORWARD {
\t\ttype filter hook forward priority filter; policy drop;
\t}
\tchain DOCKER-USER {
\t}
}
table inet other {
\tchain through {
\t\ttype filter hook forward priority filter; policy accept;
\t}
}
"""


def test_who_drops_what_is_forwarded_is_found_and_the_cure_is_told() -> None:
    assert dropping_forwards(DOCKER) == ["ip filter FORWARD"]
    advice = advice_on("ip filter FORWARD", "dsec-abcd")
    assert "iptables -I CHAIN -i dsec-abcd -j ACCEPT" in advice
    assert "DOCKER-USER" in advice


def test_tables_are_replaced_in_one_piece() -> None:
    for rules, table in ((host_rules("dsec-abcd", "dsec-abcd", BOTH), "dsec-abcd"),):
        assert rules.startswith(no_rules(table))
        assert rules.count("table inet dsec-abcd {") == 1


def test_without_ipv6_none_of_it_passes() -> None:
    four = Pools(four=FOUR, six=None)
    assert "meta nfproto ipv6 drop" in host_rules("t", "u", four)
    assert "ip6" not in host_rules("t", "u", four) + router_rules(four)
    assert "meta nfproto ipv6 drop" not in host_rules("t", "u", BOTH)
