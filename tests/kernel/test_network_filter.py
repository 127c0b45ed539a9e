"""A slot's filter, packet by packet."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path

import pytest

from dsec.linux import bpf, network_filter
from dsec.linux.network_filter import INSPECT_MARK, PortSpan, Reason
from tests.kernel import filtering
from tests.kernel.filtering import (
    ACK,
    ANY,
    AWAY4,
    AWAY6,
    DROPS,
    EVERYWHERE,
    FIN,
    GATEWAY4,
    GATEWAY6,
    LONGER,
    OWN4,
    OWN6,
    PASSES,
    PING,
    PROXY_PORT,
    REDIRECTS,
    RST,
    SLOT,
    SYN,
    TCP4,
    TCP6,
    UDP4,
    UDP6,
    Filter,
    Rules,
    back4,
    back6,
    checksum,
    datagram,
    ethernet,
    icmp,
    ip4,
    ip6,
    loaded,
    segment,
    shown,
    tcp,
    tcp_sum,
    udp,
)

pytestmark = pytest.mark.needs_root

PING4, PING6 = ethernet(ip4(icmp(8), 1)), ethernet(ip6(icmp(128), 58))
AWAY = ip_address(AWAY4).packed


@pytest.fixture
def slot() -> Iterator[Filter]:
    with loaded() as made:
        yield made


# What a policy says.


@pytest.mark.parametrize("packet", [TCP4, TCP6, UDP4, UDP6, PING4, PING6], ids=shown)
def test_without_a_policy_nothing_passes_and_with_one_what_it_allows(
    slot: Filter, packet: bytes
) -> None:
    assert slot.sends(packet)[0] != PASSES
    assert slot.next_denial().reason == "rule"
    slot.allow(*ANY)
    assert slot.sends(packet)[0] == PASSES
    slot.allow()
    assert slot.sends(packet)[0] != PASSES


@pytest.mark.parametrize(
    ("spans", "passing"),
    [
        ((tcp(443),), (TCP4, TCP6)),
        ((tcp(0, 442), tcp(444, 65535)), ()),
        ((udp(400, 500),), (UDP4, UDP6)),
        ((PING,), (PING4, PING6)),
        ((*map(tcp, range(1, 16)), tcp(443)), (TCP4, TCP6)),
    ],
)
def test_ports_and_protocols(
    slot: Filter, spans: tuple[PortSpan, ...], passing: tuple[bytes, ...]
) -> None:
    slot.allow(*spans)
    for packet in (TCP4, TCP6, UDP4, UDP6, PING4, PING6):
        assert (slot.sends(packet)[0] == PASSES) is (packet in passing)


def test_the_longest_prefix_decides(slot: Filter) -> None:
    wide, narrow = IPv4Network("198.51.0.0/16"), IPv4Network("198.51.100.0/24")
    network_filter.apply(slot.pins, {wide: ANY})
    assert slot.sends(TCP4)[0] == PASSES
    network_filter.apply(slot.pins, {wide: ANY, narrow: ()})
    assert slot.sends(TCP4)[0] != PASSES
    assert slot.sends(ethernet(ip4(segment(), 6, target="198.51.1.1")))[0] == PASSES


def test_ipv6_as_wide_as_all_does_not_mean_ipv4(slot: Filter) -> None:
    network_filter.apply(slot.pins, EVERYWHERE)
    assert slot.sends(TCP4)[0] == PASSES
    network_filter.apply(slot.pins, {IPv6Network("::/0"): ANY})
    assert slot.sends(TCP6)[0] == PASSES
    assert slot.sends(TCP4)[0] != PASSES


def test_what_the_kernel_cannot_be_told_changes_nothing(slot: Filter) -> None:
    slot.allow(*ANY)
    wrong: list[Rules] = [
        {IPv4Network("10.0.0.0/8"): tuple(map(tcp, range(1, 18)))},
        {IPv6Network("::ffff:10.0.0.0/104"): ANY},
    ]
    for networks in wrong:
        with pytest.raises(ValueError, match=r"at most 16|notation"):
            network_filter.apply(slot.pins, networks)
    assert slot.sends(TCP4)[0] == PASSES


def test_a_policy_that_never_came_to_hold_does_not_mix_with_the_next(
    slot: Filter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the edge is killed half-way: the rules are there, the number is the old one."""
    slot.allow(udp(443))

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(bpf.Map, "put", killed)
        with pytest.raises(RuntimeError):
            slot.allow(*ANY)
    assert slot.sends(TCP4)[0] != PASSES
    assert slot.sends(UDP4)[0] == PASSES
    network_filter.apply(slot.pins, {IPv4Network("203.0.113.0/24"): ANY})
    assert slot.sends(TCP4)[0] != PASSES


def test_many_rules(slot: Filter) -> None:
    rules: Rules = {IPv4Network((10 << 24 | n << 8, 24)): (tcp(n),) for n in range(1, 4097)}
    network_filter.apply(slot.pins, rules)
    for n in (1, 2000, 4096):
        target = str(IPv4Network((10 << 24 | n << 8, 24))[9])
        assert slot.sends(ethernet(ip4(segment(target=n), 6, target=target)))[0] == PASSES
        assert slot.sends(ethernet(ip4(segment(target=n + 1), 6, target=target)))[0] != PASSES


def test_too_many_rules_leave_the_old_policy(slot: Filter) -> None:
    slot.allow(*ANY)
    rules: Rules = {IPv4Network(n << 8): ANY for n in range(network_filter.MAX_NETWORKS + 1)}
    with pytest.raises(OSError, match="batch"):
        network_filter.apply(slot.pins, rules)
    assert slot.sends(TCP6)[0] == PASSES
    slot.allow()
    assert slot.sends(TCP6)[0] != PASSES


def test_what_is_to_be_inspected_is_marked(slot: Filter) -> None:
    slot.allow(tcp(80), tcp(443, inspect=True))
    assert slot.sends(TCP4)[::2] == (PASSES, INSPECT_MARK)
    assert slot.sends(ethernet(ip4(segment(target=80), 6)))[::2] == (PASSES, 0)


def test_what_no_sandbox_reaches(slot: Filter) -> None:
    slot.allow(*ANY)
    there = ethernet(ip4(segment(), 6, target="203.0.113.1"))
    assert slot.sends(there)[0] == PASSES
    network_filter.set_never(slot.shared, [IPv4Network("203.0.113.0/24")])
    assert slot.sends(there)[0] == REDIRECTS
    assert slot.next_denial().reason == "never"
    network_filter.set_never(slot.shared, [])
    assert slot.sends(there)[0] == PASSES


@pytest.mark.parametrize("target", ["224.0.0.251", "239.1.1.1", "255.255.255.255"])
def test_nobody_is_many(slot: Filter, target: str) -> None:
    network_filter.apply(slot.pins, EVERYWHERE)
    assert slot.sends(UDP4)[0] == PASSES
    assert slot.sends(ethernet(ip4(datagram(), 17, target=target)))[0] == DROPS
    assert slot.next_denial().reason == "never"


@pytest.mark.parametrize("target", ["ff05::2", "ff0e::1", "::ffff:198.51.100.2", "fe80::1"])
def test_nor_is_it_ipv4_in_disguise(slot: Filter, target: str) -> None:
    network_filter.apply(slot.pins, EVERYWHERE)
    assert slot.sends(UDP6)[0] == PASSES
    assert slot.sends(ethernet(ip6(datagram(), 17, target=target)))[0] == DROPS
    assert slot.next_denial().reason == "never"


@pytest.mark.parametrize("gateway", [GATEWAY4, GATEWAY6])
def test_of_the_gateway_only_its_services_whatever_rules_say(slot: Filter, gateway: str) -> None:
    wrap = ip6 if ":" in gateway else ip4
    ping = (icmp(128), 58) if ":" in gateway else (icmp(8), 1)
    slot.allow(*ANY)
    for body, protocol, passes in (
        (datagram(target=53), 17, True),
        (segment(target=53), 6, True),
        (segment(target=PROXY_PORT), 6, True),
        (datagram(target=PROXY_PORT), 17, False),
        (segment(target=22), 6, False),
        (*ping, False),
    ):
        packet = ethernet(wrap(body, protocol, target=gateway))
        assert (slot.sends(packet)[0] == PASSES) is passes


def test_a_slot_without_ipv6() -> None:
    with loaded() as slot:
        slot.allow(*ANY)
        assert slot.sends(TCP6)[0] == PASSES
    with loaded(six=False) as slot:
        slot.allow(*ANY)
        assert slot.sends(TCP4)[0] == PASSES
        assert slot.sends(TCP6)[0] == DROPS
        assert slot.sends(ethernet(ip6(segment(), 6, source="::")))[0] == DROPS
        assert slot.next_denial().reason == "spoofed"


# What a packet looks like.


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (ethernet(ip4(segment(), 6, source="100.96.0.10")), "spoofed"),
        (ethernet(ip4(segment(), 6, source=AWAY4)), "spoofed"),
        (ethernet(ip6(segment(), 6, source="fd64:5ec::a")), "spoofed"),
        (ethernet(ip6(segment(), 6, source=f"::ffff:{OWN4}")), "spoofed"),
        (ethernet(ip4(segment(), 6, fragment=0x2000)), "fragment"),
        (ethernet(ip4(segment(), 6, fragment=1)), "fragment"),
        (ethernet(ip4(datagram(), 17, fragment=0x2000)), "fragment"),
        (ethernet(ip6(struct.pack("!BBHI", 6, 0, 1, 1) + segment(), 44)), "fragment"),
        (ethernet(ip6(struct.pack("!BBHI", 6, 0, 0, 1) + segment(), 44)), "fragment"),
        (ethernet(ip4(segment(), 6, options=b"\x01\x01\x01\x00")), "malformed"),
        (ethernet(ip4(segment(), 6, options=b"\x83\x07\x04" + AWAY + b"\0")), "malformed"),
        (ethernet(ip4(segment(), 6, fragment=0x8000)), "malformed"),
        (ethernet(ip6(LONGER + segment(), 0)), "malformed"),
        (ethernet(ip6(LONGER + segment(), 43)), "malformed"),
        (ethernet(ip6(LONGER + segment(), 60)), "malformed"),
        (ethernet(ip4(segment(), 6, total=400)), "malformed"),
        (ethernet(ip4(segment(), 6, total=19)), "malformed"),
        (ethernet(ip4(segment(), 6, total=0)), "malformed"),
        (ethernet(ip4(segment(), 6, total=39)), "malformed"),
        (ethernet(ip4(segment()[:19], 6)), "malformed"),
        (ethernet(ip4(b"", 6)), "malformed"),
        (ethernet(ip4(segment(offset=4), 6)), "malformed"),
        (ethernet(ip4(segment(offset=6), 6)), "malformed"),
        (ethernet(ip4(segment(source=0), 6)), "malformed"),
        (ethernet(ip4(segment(target=0), 6)), "malformed"),
        (ethernet(ip6(segment(), 6, size=400)), "malformed"),
        (ethernet(ip6(segment(), 6, size=0)), "malformed"),
        (ethernet(ip6(segment(offset=15), 6)), "malformed"),
        (ethernet(ip4(datagram(size=7), 17)), "malformed"),
        (ethernet(ip4(datagram(size=10), 17)), "malformed"),
        (ethernet(ip4(datagram(target=0), 17)), "malformed"),
        (ethernet(ip4(datagram(source=0), 17)), "malformed"),
        (ethernet(ip4(datagram()[:7], 17)), "malformed"),
        (ethernet(ip6(datagram(target=0), 17)), "malformed"),
        (ethernet(ip4(icmp(8)[:7], 1)), "malformed"),
        (ethernet(ip4(icmp(5), 1)), "malformed"),
        (ethernet(ip4(icmp(0), 1)), "malformed"),
        (ethernet(ip4(icmp(13), 1)), "malformed"),
        (ethernet(ip6(icmp(134), 58)), "malformed"),
        (ethernet(ip6(icmp(136), 58)), "malformed"),
        (ethernet(ip6(icmp(8), 58)), "malformed"),
        (ethernet(ip6(icmp(8), 1)), "protocol"),
        (ethernet(ip4(icmp(128), 58)), "protocol"),
        (ethernet(ip4(segment(), 132)), "protocol"),
        (ethernet(ip4(segment(), 47)), "protocol"),
        (ethernet(ip4(ip4(segment(), 6), 4)), "protocol"),
        (ethernet(ip4(ip6(segment(), 6), 41)), "protocol"),
        (ethernet(ip6(segment(), 59)), "protocol"),
        (ethernet(ip4(segment(), 6), 0x88B5), "protocol"),
        (ethernet(ip4(segment(), 6), tag=b"\x81\0\0\5"), "protocol"),
        (ethernet(ip4(segment(), 6), 0x86DD), "malformed"),
        (ethernet(ip6(segment(), 6), 0x0800), "malformed"),
        (b"\x02" + TCP4[1:], "malformed"),
        (b"\xff" * 6 + TCP4[6:], "malformed"),
    ],
    ids=shown,
)
def test_what_is_not_plain_is_dropped_though_all_is_allowed(
    slot: Filter, packet: bytes, reason: Reason
) -> None:
    slot.allow(*ANY)
    for plain in (TCP4, TCP6, UDP4, PING4, PING6):
        assert slot.sends(plain)[0] == PASSES
    assert slot.sends(packet)[0] == DROPS
    assert slot.next_denial().reason == reason


@pytest.mark.parametrize("packet", [TCP4, TCP6, UDP4, UDP6, PING4, PING6], ids=shown)
def test_every_shorter_packet_is_dropped(slot: Filter, packet: bytes) -> None:
    slot.allow(*ANY)
    assert slot.sends(packet)[0] == PASSES
    least = 34 if packet[12:14] == b"\x08\0" else 54  # of shorter ones the kernel tries none
    for size in range(least, len(packet)):
        assert slot.sends(packet[:size])[0] == DROPS


def test_padding_is_not_wrong(slot: Filter) -> None:
    slot.allow(*ANY)
    assert slot.sends(UDP4 + bytes(18))[0] == PASSES


@pytest.mark.parametrize(
    "packet",
    [
        ethernet(ip6(icmp(133), 58, target="ff02::2")),
        ethernet(ip6(struct.pack("!BBHI", 58, 0, 0x0502, 0) + icmp(143), 0, "::", "ff02::16")),
        ethernet(ip4(segment(), 6), 0x0806),
        ethernet(ip4(icmp(3, 3, ip4(datagram(), 17, AWAY4, OWN4)), 1)),
    ],
    ids=shown,
)
def test_what_kernels_say_unasked_is_dropped_and_no_denial(slot: Filter, packet: bytes) -> None:
    assert slot.sends(packet)[0] == DROPS
    assert network_filter.counters(slot.pins).denied_packets == 0
    assert slot.sends(TCP4)[0] != PASSES
    assert network_filter.counters(slot.pins).denied_packets == 1


# What comes back.


def test_answers_pass_by_where_they_come_from(slot: Filter) -> None:
    answers = {
        back4(segment(443, 40000, SYN | ACK), 6): (tcp(443),),
        back6(segment(443, 40000, ACK), 6): (tcp(443),),
        back4(datagram(443, 40000), 17): (udp(443),),
        back6(datagram(443, 40000), 17): (udp(443),),
        back4(icmp(0), 1): (PING,),
        back6(icmp(129), 58): (PING,),
    }
    for packet, spans in answers.items():
        slot.allow(*spans)
        assert slot.gets(packet)[:2] == (PASSES, packet)
    slot.allow(udp(1))
    for packet, spans in answers.items():
        verdict, got, _ = slot.gets(packet)
        is_tcp = spans == (tcp(443),)
        assert verdict == (PASSES if is_tcp else DROPS)
        assert not is_tcp or got[-7] & RST


@pytest.mark.parametrize(
    "packet",
    [
        back4(segment(443, 22, SYN), 6),
        back6(segment(443, 22, SYN), 6),
        back4(segment(53, 22, SYN), 6, GATEWAY4),
        back4(icmp(8), 1),
        back6(icmp(128), 58),
        back4(icmp(5), 1),
        back6(icmp(135), 58),
        back4(segment(443, 40000, ACK), 6, fragment=0x2000),
        ethernet(ip4(segment(443, 40000, ACK), 6, AWAY4, "100.96.0.10")),
    ],
    ids=shown,
)
def test_nobody_begins_with_a_sandbox(slot: Filter, packet: bytes) -> None:
    slot.allow(*ANY)
    assert slot.gets(back4(segment(443, 40000, ACK), 6))[0] == PASSES
    assert slot.gets(packet)[0] == DROPS
    assert slot.next_denial().inbound


def test_the_gateway_answers_for_its_services_alone(slot: Filter) -> None:
    assert slot.gets(back4(datagram(53, 40000), 17, GATEWAY4))[0] == PASSES
    assert slot.gets(back6(segment(PROXY_PORT, 40000, ACK), 6, GATEWAY6))[0] == PASSES
    assert slot.gets(back4(datagram(54, 40000), 17, GATEWAY4))[0] == DROPS


@pytest.mark.parametrize("kind", [3, 11, 12])
def test_errors_pass_about_what_may_be_sent(slot: Filter, kind: int) -> None:
    def error(quoted: bytes) -> int:
        return slot.gets(back4(icmp(kind, 1, quoted), 1, "203.0.113.9"))[0]

    slot.allow(tcp(443), udp(443))
    assert error(ip4(segment(), 6)[:28]) == PASSES
    assert error(ip4(datagram(), 17)) == PASSES
    assert error(ip4(segment(target=80), 6)) == DROPS
    assert error(ip4(icmp(8), 1)) == DROPS
    assert error(ip4(segment(), 6, source="100.96.0.10")) == DROPS
    assert error(ip4(segment(), 6, options=bytes(4))) == DROPS
    assert error(ip4(segment(), 6, fragment=0x2000)) == PASSES
    assert error(ip4(segment(), 6, fragment=1)) == DROPS
    assert error(ip4(segment(), 6)[:22]) == DROPS
    assert error(b"") == DROPS
    assert error(ip4(datagram(target=53), 17, target=GATEWAY4)) == PASSES
    assert error(ip4(segment(), 6, target="192.0.2.7")) == DROPS


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_errors_of_ipv6(slot: Filter, kind: int) -> None:
    def error(quoted: bytes) -> int:
        return slot.gets(back6(icmp(kind, 0, quoted), 58, "2001:db8:9::9"))[0]

    slot.allow(tcp(443))
    assert error(ip6(segment(), 6)[:48]) == PASSES
    assert error(ip6(segment(target=80), 6)) == DROPS
    assert error(ip6(segment(), 6, source="fd64:5ec::a")) == DROPS
    assert error(ip4(segment(), 6)) == DROPS


# Resets.


@pytest.mark.parametrize("six", [False, True])
@pytest.mark.parametrize(
    ("flags", "body", "expected"),
    [
        (SYN, b"", (RST | ACK, 0, 1001)),
        (SYN, b"early", (RST | ACK, 0, 1006)),
        (FIN, b"abc", (RST | ACK, 0, 1004)),
        (ACK, b"", (RST, 77, 0)),
        (ACK | FIN, b"x" * 999, (RST, 77, 0)),
    ],
)
def test_denied_tcp_is_answered(
    slot: Filter, *, six: bool, flags: int, body: bytes, expected: tuple[int, int, int]
) -> None:
    wrap, protocol_at = (ip6, 20) if six else (ip4, 23)
    sent = b"\0" * 6 + b"\2" * 6 + ethernet(wrap(segment(flags=flags, ack=77, body=body), 6))[12:]
    slot.allow(*ANY)
    assert slot.sends(sent)[:2] == (PASSES, sent)
    slot.allow()
    verdict, got, _ = slot.sends(sent)
    at = 54 if six else 34
    source, target, seq, ack, offset, told = struct.unpack_from("!HHIIBB", got, at)
    assert verdict == REDIRECTS
    assert got[:12] == b"\2" * 6 + b"\0" * 6
    assert got[protocol_at] == 6
    assert len(got) == at + 20
    assert (source, target, offset) == (443, 40000, 5 << 4)
    assert (told, seq, ack) == expected
    assert _ends(got) == ((AWAY6, OWN6) if six else (AWAY4, OWN4))
    assert tcp_sum(got) == 0
    assert six or checksum(got[14:34]) == 0


@pytest.mark.parametrize("six", [False, True])
def test_denied_tcp_becomes_a_reset_on_its_way_in(slot: Filter, *, six: bool) -> None:
    wrap = back6 if six else back4
    sent = wrap(segment(443, 40000, ACK, seq=5, ack=9, body=b"x" * 700), 6)
    slot.allow(*ANY)
    assert slot.gets(sent)[:2] == (PASSES, sent)
    slot.allow()
    verdict, got, _ = slot.gets(sent)
    source, target, seq, ack, _, told = struct.unpack_from("!HHIIBB", got, 54 if six else 34)
    assert verdict == PASSES
    assert (source, target, seq, ack, told) == (443, 40000, 5, 9, RST | ACK)
    assert _ends(got) == ((AWAY6, OWN6) if six else (AWAY4, OWN4))
    assert tcp_sum(got) == 0
    assert six or checksum(got[14:34]) == 0


def _ends(packet: bytes) -> tuple[str, str]:
    cut = (26, 30, 34) if packet[12:14] == b"\x08\0" else (22, 38, 54)
    source, target = packet[cut[0] : cut[1]], packet[cut[1] : cut[2]]
    return str(ip_address(source)), str(ip_address(target))


@pytest.mark.parametrize("flags", [RST, RST | ACK])
def test_a_reset_is_never_answered(slot: Filter, flags: int) -> None:
    assert slot.sends(TCP4)[0] == REDIRECTS
    assert slot.sends(ethernet(ip4(segment(flags=flags), 6)))[0] == DROPS
    assert slot.gets(back4(segment(443, 40000, flags), 6))[0] == DROPS


# What is told.


def test_a_denial_says_what_was_tried(slot: Filter) -> None:
    slot.sends(TCP6)
    denial = slot.next_denial()
    assert (denial.slot, denial.reason, denial.inbound, denial.protocol, denial.port) == (
        SLOT, "rule", False, 6, 443,
    )  # fmt: skip
    assert denial.address == ip_address(AWAY6).packed
    slot.gets(back4(datagram(53, 40000), 17))
    denial = slot.next_denial()
    assert (denial.inbound, denial.protocol, denial.port) == (True, 17, 53)
    assert denial.address == AWAY


def test_of_a_flood_some_are_told_and_all_counted(slot: Filter) -> None:
    flood = 500
    for _ in range(flood):
        slot.sends(UDP4)
    assert 1 <= len(slot.denials.read()) < flood
    counted = network_filter.counters(slot.pins)
    assert counted.denied_packets == flood
    assert counted.sent_packets == 0


def test_what_passes_is_counted(slot: Filter) -> None:
    slot.allow(*ANY)
    slot.sends(TCP4)
    slot.gets(back4(datagram(53, 40000, b"x" * 100), 17))
    counted = network_filter.counters(slot.pins)
    assert (counted.sent_packets, counted.sent_bytes) == (1, len(TCP4))
    assert (counted.received_packets, counted.received_bytes) == (1, 14 + 20 + 8 + 100)
    assert counted.denied_packets == 0


# Loading.


def test_nothing_is_loaded_before_somebody_said_what_nobody_reaches(tmp_path: Path) -> None:
    with filtering.bpf_directory() as place:
        load = network_filter.load(
            filtering.object_file(), filtering.settings(), place / "pins", place
        )
        with pytest.raises(FileNotFoundError, match="never"):
            load.__enter__()
        network_filter.set_never(place, [])
        (place / "pins").mkdir()
        broken = tmp_path / "broken.o"
        broken.write_bytes(filtering.object_file().read_bytes()[:5000])
        broken_load = network_filter.load(broken, filtering.settings(), place / "pins", place)
        with pytest.raises(OSError, match="libbpf"):
            broken_load.__enter__()


def test_slots_of_a_node_share_only_what_is_the_nodes() -> None:
    with loaded() as one:
        pins = one.shared.parent / "8"
        pins.mkdir()
        with network_filter.load(
            filtering.object_file(), filtering.settings(), pins, one.shared
        ) as other:
            one.allow(*ANY)
            assert one.sends(TCP4)[0] == PASSES
            assert filtering.run(other.from_sandbox, TCP4)[0] != PASSES
            network_filter.apply(pins, EVERYWHERE)
            assert filtering.run(other.from_sandbox, TCP4)[0] == PASSES
            network_filter.set_never(one.shared, [IPv4Network("198.51.100.0/24")])
            assert one.sends(TCP4)[0] != PASSES
            assert filtering.run(other.from_sandbox, TCP4)[0] != PASSES


def test_nothing_is_held(slot: Filter) -> None:
    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    slot.allow(*ANY)
    before = held()
    network_filter.apply(slot.pins, EVERYWHERE, lambda _, spans: spans)
    network_filter.name_add(slot.pins, AWAY, ANY, 60)
    network_filter.names(slot.pins)
    network_filter.counters(slot.pins)
    network_filter.set_never(slot.shared, [])
    assert held() == before
