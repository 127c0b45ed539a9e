"""What a slot's filter does with addresses that names gave."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from dsec.linux import network_filter
from dsec.linux.network_filter import INSPECT_MARK, MAX_NAMES, PortSpan
from tests.kernel.filtering import (
    ACK,
    ANY,
    AWAY4,
    AWAY6,
    DROPS,
    GATEWAY4,
    PASSES,
    REDIRECTS,
    TCP4,
    TCP6,
    UDP4,
    Filter,
    back4,
    datagram,
    ethernet,
    ip4,
    loaded,
    segment,
    tcp,
    udp,
)

pytestmark = pytest.mark.needs_root

AWAY = ip_address(AWAY4).packed


@pytest.fixture
def slot() -> Iterator[Filter]:
    with loaded() as made:
        yield made


def test_an_address_of_a_name(slot: Filter) -> None:
    slot.allow(udp(53))
    assert slot.sends(TCP4)[0] != PASSES
    network_filter.name_add(slot.pins, AWAY, [tcp(443, inspect=True)], 60)
    assert slot.sends(TCP4)[::2] == (PASSES, INSPECT_MARK)
    assert slot.sends(ethernet(ip4(datagram(target=53), 17)))[0] == PASSES
    assert slot.sends(UDP4)[0] != PASSES
    network_filter.name_add(slot.pins, ip_address(AWAY6).packed, [tcp(443)], 60)
    assert slot.sends(TCP6)[0] == PASSES
    assert {address: name.spans for address, name in network_filter.names(slot.pins).items()} == {
        AWAY: (tcp(443, inspect=True),),
        ip_address(AWAY6).packed: (tcp(443),),
    }


def test_a_name_that_expired(slot: Filter) -> None:
    slot.allow()
    goes_on = ethernet(ip4(segment(flags=ACK), 6))
    answer = back4(segment(443, 40000, ACK), 6)
    network_filter.name_add(slot.pins, AWAY, ANY, 60)
    for packet in (TCP4, UDP4, goes_on):
        assert slot.sends(packet)[0] == PASSES
    network_filter.name_add(slot.pins, AWAY, ANY, -1)
    assert slot.sends(TCP4)[0] == REDIRECTS
    assert slot.next_denial().reason == "expired"
    assert slot.sends(UDP4)[0] == PASSES
    network_filter.name_add(slot.pins, AWAY, ANY, -61)
    assert slot.sends(UDP4)[0] == DROPS
    assert slot.next_denial().reason == "expired"
    assert slot.sends(goes_on)[0] == PASSES
    assert slot.gets(answer)[:2] == (PASSES, answer)


def test_an_expired_name_takes_nothing_from_rules(slot: Filter) -> None:
    slot.allow(tcp(443))
    network_filter.name_add(slot.pins, AWAY, [tcp(443, inspect=True)], -1)
    assert slot.sends(TCP4)[::2] == (PASSES, 0)


def test_a_name_opens_nothing_that_nobody_reaches(slot: Filter) -> None:
    slot.allow()
    for target, passes in (("203.0.113.7", True), ("192.0.2.7", False), (GATEWAY4, False)):
        network_filter.name_add(slot.pins, ip_address(target).packed, ANY, 60)
        packet = ethernet(ip4(segment(), 6, target=target))
        assert (slot.sends(packet)[0] == PASSES) is passes


def test_a_new_policy_keeps_of_names_what_it_allows(slot: Filter) -> None:
    other = ip_address("203.0.113.7").packed
    slot.allow()
    network_filter.name_add(slot.pins, AWAY, [tcp(443), tcp(80)], 60)
    network_filter.name_add(slot.pins, other, [tcp(443)], 60)
    asked: list[tuple[bytes, tuple[PortSpan, ...]]] = []

    def keep(address: bytes, spans: tuple[PortSpan, ...]) -> tuple[PortSpan, ...]:
        asked.append((address, spans))
        return spans[:1] if address == AWAY else ()

    network_filter.apply(slot.pins, {}, keep)
    assert sorted(asked) == [(AWAY, (tcp(443), tcp(80))), (other, (tcp(443),))]
    (name,) = network_filter.names(slot.pins).values()
    assert name.spans == (tcp(443),)
    assert 0 < name.left_s <= 60
    assert slot.sends(TCP4)[0] == PASSES
    assert slot.sends(ethernet(ip4(segment(target=80), 6)))[0] != PASSES
    network_filter.apply(slot.pins, {})
    assert slot.sends(TCP4)[0] != PASSES
    assert not network_filter.names(slot.pins)


def test_of_too_many_names_the_longest_expired_go(slot: Filter) -> None:
    slot.allow()

    def add(number: int, ttl_s: float) -> None:
        network_filter.name_add(slot.pins, number.to_bytes(16, "big"), [tcp(443)], ttl_s)

    for number in range(MAX_NAMES):
        add(number, -100 + number if number < 3 else 60)
    add(MAX_NAMES, 60)
    held = network_filter.names(slot.pins)
    assert [n for n in range(4) if n.to_bytes(16, "big") in held] == [2, 3]
    for number in range(MAX_NAMES + 1, MAX_NAMES + 3):
        add(number, 60)
    with pytest.raises(OSError, match="too many") as raised:
        add(MAX_NAMES + 3, 60)
    assert raised.value.errno == errno.ENOSPC
    add(MAX_NAMES, 90)
    network_filter.apply(slot.pins, {}, lambda _, spans: spans)
    assert len(network_filter.names(slot.pins)) == MAX_NAMES


def test_names_before_a_policy_are_refused(slot: Filter) -> None:
    with pytest.raises(FileNotFoundError, match="no policy"):
        network_filter.name_add(slot.pins, AWAY, [tcp(443)], 60)
    with pytest.raises(FileNotFoundError):
        network_filter.name_add(slot.shared / "gone", AWAY, [tcp(443)], 60)
