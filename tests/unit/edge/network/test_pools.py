from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

import pytest

from dsec.base.errors import Conflict
from dsec.edge.network.never import never
from dsec.edge.network.pools import (
    DEFAULT4,
    FIRST_SLOT,
    Numbers,
    Pools,
    candidates4,
    candidates6,
    mac_of,
    overlapping,
)

POOLS = Pools(four=IPv4Network("100.96.0.0/24"), six=IPv6Network("fd64:5ec::/64"))


def test_addresses_follow_from_the_number() -> None:
    assert [str(each) for each in POOLS.of(0)] == ["100.96.0.16", "fd64:5ec::10"]
    assert [str(each) for each in POOLS.gateways] == ["100.96.0.1", "fd64:5ec::1"]


def test_no_slot_has_the_address_of_all() -> None:
    last = POOLS.of(POOLS.capacity - 1)[0]
    assert last == POOLS.four.broadcast_address - 1
    assert POOLS.capacity == 256 - FIRST_SLOT - 1
    with pytest.raises(ValueError, match="no slot"):
        POOLS.of(POOLS.capacity)


def test_without_ipv6_there_is_one_address() -> None:
    pools = Pools(four=POOLS.four, six=None)
    assert len(pools.of(3)) == len(pools.gateways) == len(pools.networks) == 1


def test_default_pools_are_parts_of_one_network_and_different() -> None:
    tried = list(candidates4(None))
    assert len(set(tried)) == 32
    assert all(pool.subnet_of(DEFAULT4) for pool in tried)
    own, other = set(candidates6(None, "one")), set(candidates6(None, "two"))
    assert own == set(candidates6(None, "one"))
    assert not own & other


@pytest.mark.parametrize("pool", ["10.0.0.0/25", "0.0.0.0/4"])
def test_a_configured_pool_has_a_size_that_makes_sense(pool: str) -> None:
    with pytest.raises(Conflict):
        list(candidates4(IPv4Network(pool)))


def test_what_the_host_routes_overlaps_but_its_default_route_does_not() -> None:
    others = [ip_network(each) for each in ("0.0.0.0/0", "::/0", "100.64.0.0/10")]
    assert overlapping(POOLS.four, others) == others[2]
    assert overlapping(IPv6Network("fd00::/8"), others) is None


def test_numbers_rest_as_long_as_they_can() -> None:
    numbers = Numbers(3, 1)
    assert [numbers.take() for _ in range(2)] == [1, 2]
    numbers.give_back(1)
    assert numbers.take() == 0, "one that was never used comes first"
    assert numbers.take() == 1
    with pytest.raises(IndexError):
        numbers.take()


def test_a_claimed_number_is_nobody_elses_twice() -> None:
    numbers = Numbers(2)
    numbers.claim(1)
    numbers.give_back(1)
    assert sorted([numbers.take(), numbers.take()]) == [0, 1]
    with pytest.raises(IndexError):
        numbers.take()
    numbers.give_back(1)
    assert numbers.take() == 1
    assert len(numbers) == 2


def test_hardware_addresses_are_local_single_and_told_apart() -> None:
    one, two = mac_of("one"), mac_of("two")
    assert one != two
    assert one == mac_of("one")
    assert one.startswith("02:")
    assert len(bytes.fromhex(one.replace(":", ""))) == 6


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "127.0.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.251",
        "fd00:ec2::254",
        "fe80::a9fe:a9fe",
        "fd20:ce::254",
        "::1",
        "::",
        "ff02::1",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "2002:7f00:1::",
        "192.0.2.7",
        "64:ff9b::c000:207",
    ],
)
def test_never(address: str) -> None:
    refused = never([ip_network("192.0.2.7/32")])
    assert any(ip_address(address) in network for network in refused)


@pytest.mark.parametrize("address", ["192.0.2.8", "8.8.8.8", "100.96.1.1", "2600::1", "2002:808::"])
def test_not_never(address: str) -> None:
    refused = never([ip_network("192.0.2.7/32")])
    assert not any(ip_address(address) in network for network in refused)
