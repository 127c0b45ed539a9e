from __future__ import annotations

import anyio
import dns.message
import dns.rcode
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from dsec.edge.network.policy import Span
from dsec.edge.network.warden.messages import Reach
from dsec.linux.network_filter import PortSpan
from tests.unit.edge.warden.names import NameServer
from tests.unit.edge.warden.world import ALL, OTHER, World, allow, assigned, until_eof

WEB_IN_KERNEL = (PortSpan(6, 80, 80, inspect=True), PortSpan(6, 443, 443, inspect=True))
A = "203.0.113.10"


@pytest.fixture
def server(server: NameServer) -> NameServer:
    server.has("good.example", A=[A], AAAA=["2001:db8::10"], TXT=['"secret"'])
    server.has("other.example", A=["203.0.113.20"])
    return server


async def test_an_allowed_name_is_answered_and_its_address_opened(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    answer = await world.ask("GOOD.example")
    assert (answer.code, answer.addresses, answer.ttl_s) == ("NOERROR", [A], 300)
    assert world.reachable() == {A: WEB_IN_KERNEL}
    assert (await world.ask("good.example", "AAAA")).addresses == ["2001:db8::10"]
    assert set(world.reachable()) == {A, "2001:db8::10"}
    assert world.reasons() == {}


async def test_another_name_does_not_exist_and_is_asked_nowhere(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    assert (await world.ask("good.example")).code == "NOERROR"
    world.server.asked.clear()
    assert (await world.ask("other.example")).code == "NXDOMAIN"
    assert world.server.asked == []
    assert [(e.reason, e.name, e.protocol) for e in world.denied()] == [
        ("name", "other.example", "dns")
    ]
    assert set(world.reachable()) == {A}


async def test_a_stranger_gets_no_answer(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    async with world.datagrams(OTHER) as stranger:
        await stranger.send(dns.message.make_query("good.example", "A").to_wire())
        assert (await world.ask("good.example")).code == "NOERROR"  # after the stranger's
        assert len(world.server.asked) == 1
    await world.guests.assign(assigned(allow("good.example"), address4=OTHER, sandbox="sb-2"))
    assert (await world.ask("good.example", source=OTHER)).addresses == [A]


async def test_each_sandbox_has_its_own_rules_and_map(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    await world.guests.assign(assigned(allow("other.example"), address4=OTHER, sandbox="sb-2"))
    assert (await world.ask("good.example")).code == "NOERROR"
    assert (await world.ask("other.example", source=OTHER)).code == "NOERROR"
    assert (await world.ask("good.example", source=OTHER)).code == "NXDOMAIN"
    assert (set(world.reachable()), set(world.reachable(OTHER))) == ({A}, {"203.0.113.20"})
    assert (world.reasons("sb-1"), world.reasons("sb-2")) == ({}, {})


async def test_the_most_specific_pattern_decides(world: World) -> None:
    world.server.has("deep.good.example", A=[A])
    world.server.has("bad.good.example", A=[A])
    rules = allow("*.good.example"), allow("bad.good.example", *ALL, allowed=False)
    await world.guests.assign(assigned(*rules))
    assert (await world.ask("deep.good.example")).code == "NOERROR"
    assert (await world.ask("bad.good.example")).code == "NXDOMAIN"
    assert (await world.ask("good.example")).code == "NXDOMAIN"


@pytest.mark.parametrize("kind", ["TXT", "HTTPS", "SVCB", "ANY", "MX", "NULL", "AXFR"])
async def test_other_kinds_of_question_have_no_answer(world: World, kind: str) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    assert (await world.ask("good.example")).addresses == [A]
    answer = await world.ask("good.example", kind)
    assert (answer.code, answer.addresses) == ("NOERROR", [])
    assert world.server.asked == [("good.example", "A")]
    assert world.reasons() == {"name_type": 1}


async def test_a_question_of_another_class_has_no_answer(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    query = dns.message.make_query("good.example", "A", rdclass="CH")
    answer = dns.message.from_wire(await world.ask_raw(query.to_wire()))
    assert not answer.answer
    assert world.reasons() == {"name_type": 1}


async def test_aliases_are_followed_to_their_end_and_not_told(world: World) -> None:
    world.server.has("www.good.example", CNAME=["a.cdn.example."])
    world.server.has("a.cdn.example", CNAME=["b.cdn.example."], stop=[])
    world.server.has("b.cdn.example", A=["203.0.113.30"])
    await world.guests.assign(assigned(allow("www.good.example")))
    answer = await world.ask("www.good.example")
    assert answer.addresses == ["203.0.113.30"]
    assert [str(rrset.name) for rrset in answer.message.answer] == ["www.good.example."]
    assert world.reachable() == {"203.0.113.30": WEB_IN_KERNEL}
    assert (await world.ask("b.cdn.example")).code == "NXDOMAIN"


async def test_aliases_in_a_circle(world: World) -> None:
    world.server.has("x.example", CNAME=["y.example."])
    world.server.has("y.example", CNAME=["x.example."])
    await world.guests.assign(assigned(allow("*.example"), allow("good.example")))
    assert (await world.ask("good.example")).code == "NOERROR"
    assert (await world.ask("x.example")).code == "SERVFAIL"


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        ("A", "10.0.0.5"),
        ("A", "192.168.1.1"),
        ("A", "100.64.0.1"),
        ("A", "169.254.169.254"),
        ("A", "127.0.0.1"),
        ("A", "0.0.0.0"),
        ("A", "203.0.113.200"),
        ("AAAA", "fd00::5"),
        ("AAAA", "::1"),
        ("AAAA", "fe80::1"),
        ("AAAA", "::ffff:10.0.0.5"),
        ("AAAA", "64:ff9b::a00:5"),
        ("AAAA", "2002:a00:5::"),
    ],
)
async def test_rebinding(world: World, kind: str, address: str) -> None:
    public = {"A": A, "AAAA": "2001:db8::10"}[kind]
    world.server.has("rebind.example", **{kind: [address, public]})
    await world.guests.assign(assigned(allow("rebind.example")))
    answer = await world.ask("rebind.example", kind)
    assert answer.addresses == [public]
    assert set(world.reachable()) == {public}


async def test_a_name_with_nothing_but_private_addresses(world: World) -> None:
    world.server.has("inside.example", A=["10.0.0.5"])
    await world.guests.assign(assigned(allow("inside.example")))
    answer = await world.ask("inside.example")
    assert (answer.code, answer.addresses, world.reachable()) == ("NOERROR", [], {})
    assert [(e.reason, e.name, e.address) for e in world.denied()] == [
        ("never", "inside.example", "10.0.0.5")
    ]


async def test_a_network_rule_allows_a_private_address_but_never_the_node(world: World) -> None:
    world.server.has("inside.example", A=["10.0.0.5", "10.0.0.6", "203.0.113.200"])
    networks = [
        Reach(network="10.0.0.0/24", spans=ALL),
        Reach(network="10.0.0.6/32", spans=ALL, allowed=False),
        Reach(network="203.0.113.0/24", spans=ALL),
    ]
    await world.guests.assign(assigned(allow("inside.example"), networks=networks))
    assert (await world.ask("inside.example")).addresses == ["10.0.0.5"]


async def test_the_operators_own_names_may_be_private(world: World) -> None:
    world.server.has("mirror.example", A=["10.0.0.7", "203.0.113.200"])
    await world.guests.assign(assigned(allow("mirror.example")))
    assert (await world.ask("mirror.example")).addresses == ["10.0.0.7"]


async def test_times_are_within_limits(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example"), allow("other.example")))
    world.server.ttl_s = 0
    assert (await world.ask("good.example")).ttl_s == 30
    world.server.ttl_s = 1 << 30
    assert (await world.ask("other.example")).ttl_s == 3600


async def test_the_cache_is_shared_and_runs_out(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    await world.guests.assign(assigned(allow("good.example"), address4=OTHER, sandbox="sb-2"))
    assert (await world.ask("good.example")).ttl_s == 300
    world.clock.at += 100
    assert (await world.ask("good.example", source=OTHER)).ttl_s == 200
    assert len(world.server.asked) == 1
    assert world.reachable(OTHER) == {A: WEB_IN_KERNEL}
    world.clock.at += 201
    assert (await world.ask("good.example")).ttl_s == 300
    assert len(world.server.asked) == 2


async def test_what_does_not_exist_is_remembered_too(world: World) -> None:
    await world.guests.assign(assigned(allow("gone.example"), allow("other.example")))
    for _ in range(2):
        assert (await world.ask("gone.example")).code == "NXDOMAIN"
        assert (await world.ask("other.example", "AAAA")).code == "NOERROR"
    assert len(world.server.asked) == 2


async def test_the_cache_is_bounded(world: World) -> None:
    world.limited(cache_entries=2)
    for n in range(3):
        world.server.has(f"n{n}.good.example", A=[A])
    await world.guests.assign(assigned(allow("*.good.example")))
    for n in (0, 1, 2, 2, 1, 0):
        assert (await world.ask(f"n{n}.good.example")).code == "NOERROR"
    assert len(world.server.asked) == 4


async def test_an_address_of_two_names_has_the_ports_of_both(world: World) -> None:
    world.server.has("git.example", A=[A])
    await world.guests.assign(
        assigned(allow("good.example"), allow("git.example", Span("tcp", 22, 22)))
    )
    await world.ask("good.example")
    await world.ask("git.example")
    assert world.reachable() == {A: (PortSpan(6, 22, 22), *WEB_IN_KERNEL)}


async def test_the_web_ports_of_a_range_are_inspected(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example", *ALL)))
    await world.ask("good.example")
    assert world.reachable()[A] == (
        PortSpan(6, 0, 79),
        PortSpan(6, 80, 80, inspect=True),
        PortSpan(6, 81, 442),
        PortSpan(6, 443, 443, inspect=True),
        PortSpan(6, 444, 65535),
        PortSpan(17, 0, 65535),
    )


async def test_everything_allowed_opens_no_address_by_its_name(world: World) -> None:
    networks = [Reach(network="0.0.0.0/0", spans=ALL)]
    await world.guests.assign(assigned(allow("*", *ALL), networks=networks))
    assert (await world.ask("good.example")).addresses == [A]
    assert world.reachable() == {}


async def test_a_flood_is_refused_then_dropped_and_others_are_served(world: World) -> None:
    world.limited(questions_per_s=1.0, questions_burst=5.0)
    await world.guests.assign(assigned(allow("good.example")))
    await world.guests.assign(assigned(allow("good.example"), address4=OTHER, sandbox="sb-2"))
    codes = [(await world.ask("good.example")).code for _ in range(8)]
    assert codes == ["NOERROR"] * 5 + ["REFUSED"] * 3
    async with world.datagrams() as flood:
        for _ in range(100):
            await flood.send(dns.message.make_query("good.example", "A").to_wire())
        assert (await world.ask("good.example", source=OTHER)).code == "NOERROR"
    world.clock.at += 2
    assert (await world.ask("good.example")).code == "NOERROR"
    reasons = world.reasons()
    assert reasons.keys() == {"name_rate"}
    assert reasons["name_rate"] > 3


async def test_names_below_a_wildcard_are_counted(world: World) -> None:
    world.limited(wildcard_names_per_minute=3)
    for n in range(5):
        world.server.has(f"n{n}.good.example", A=[A])
    await world.guests.assign(assigned(allow("*.good.example"), allow("n4.good.example")))
    codes = [(await world.ask(f"n{n}.good.example")).code for n in (0, 1, 2, 3, 4, 0)]
    assert codes == ["NOERROR"] * 3 + ["REFUSED"] + ["NOERROR"] * 2
    assert world.reasons() == {"name_rate": 1}
    world.clock.at += 61
    assert (await world.ask("n3.good.example")).code == "NOERROR"


@pytest.mark.parametrize(
    "below",
    [
        "a" * 41,
        "mfrggzdfmztwq2lknnwg23tpobyxe43u.ov3ho6dzpiydcmrt",
        "4d2a9f83c1b7e05d6f12.8a3b7c9d0e1f2a4b5c6d.7e8f90a1b2c3d4e5",
    ],
)
async def test_names_that_carry_data(world: World, below: str) -> None:
    plain, smuggled = "files-eu-west-1.assets.good.example", f"{below}.good.example"
    world.server.has(plain, A=[A])
    world.server.has(smuggled, A=[A])
    await world.guests.assign(assigned(allow("*.good.example")))
    assert (await world.ask(plain)).code == "NOERROR"
    assert (await world.ask(smuggled)).code == "NXDOMAIN"
    assert world.reasons() == {"name_entropy": 1}
    assert (smuggled, "A") not in world.server.asked
    await world.guests.assign(assigned(allow("*.good.example"), allow(smuggled)))
    assert (await world.ask(smuggled)).code == "NOERROR"  # named itself, it is no message


async def test_over_tcp_one_question_after_the_other(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    async with await world.connect("dns_tcp") as stream:
        buffered = BufferedByteReceiveStream(stream)
        for _ in range(2):
            wire = dns.message.make_query("good.example", "A").to_wire()
            await stream.send(len(wire).to_bytes(2, "big") + wire)
            size = int.from_bytes(await buffered.receive_exactly(2), "big")
            answer = dns.message.from_wire(await buffered.receive_exactly(size))
            assert answer.rcode() == dns.rcode.NOERROR
        await stream.send(b"\xff\xff")
        assert await until_eof(stream) == b""


async def test_many_questions_at_once_are_all_answered(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    queries = {
        query.id: query
        for query in (dns.message.make_query("good.example", "A") for _ in range(60))
    }
    async with world.datagrams() as udp:
        for query in queries.values():
            await udp.send(query.to_wire())
        with anyio.fail_after(20):
            while queries:
                answer = dns.message.from_wire(await udp.receive())
                assert answer.rcode() == dns.rcode.NOERROR
                del queries[answer.id]


async def test_connections_of_one_sandbox_are_bounded(world: World) -> None:
    world.limited(dns_connections=1)
    await world.guests.assign(assigned(allow("good.example")))
    wire = dns.message.make_query("good.example", "A").to_wire()
    async with await world.connect("dns_tcp") as first:
        await first.send(len(wire).to_bytes(2, "big") + wire)
        assert await first.receive()
        async with await world.connect("dns_tcp") as second:
            assert await until_eof(second) == b""


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\x00",
        b"\xff" * 12,
        b"\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01",
        b"\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x3fshort",
        b"\x00\x01\x81\x80\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01",
        b"\x00\x01\x01\x00\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x01\x00\x01",
    ],
)
async def test_broken_questions_are_survived(world: World, wire: bytes) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    async with world.datagrams() as udp:
        await udp.send(wire)
    assert (await world.ask("good.example")).addresses == [A]


@pytest.mark.parametrize("label", [b"a b", b"a\x00b", b"a.b", b"\xff", b"a\nb"])
async def test_names_of_odd_bytes_are_nobodys(world: World, label: bytes) -> None:
    await world.guests.assign(assigned(allow("*.example")))
    assert (await world.ask("good.example")).code == "NOERROR"
    wire = bytearray(dns.message.make_query("x.example", "A").to_wire())
    assert wire[12:14] == b"\x01x"
    wire[12:14] = bytes([len(label)]) + label
    answer = dns.message.from_wire(await world.ask_raw(bytes(wire)))
    assert answer.rcode() == dns.rcode.NXDOMAIN
    assert world.reasons() == {"name": 1}


async def test_a_resolver_that_is_silent_is_one_failure_for_a_while(world: World) -> None:
    world.limited(upstream_attempt_s=0.05)
    world.server.silent = True
    await world.guests.assign(assigned(allow("good.example")))
    assert (await world.ask("good.example")).code == "SERVFAIL"
    world.server.silent = False
    assert (await world.ask("good.example")).code == "SERVFAIL"
    assert world.server.asked == []
    world.clock.at += 6
    assert (await world.ask("good.example")).addresses == [A]


async def test_a_truncated_answer_is_asked_for_over_tcp(world: World) -> None:
    world.server.truncates = True
    await world.guests.assign(assigned(allow("good.example")))
    assert (await world.ask("good.example")).addresses == [A]
    assert world.server.over_tcp == 1


async def test_an_answer_in_another_case_is_asked_for_over_tcp(world: World) -> None:
    world.server.lowers_case = True
    await world.guests.assign(assigned(allow("good.example")))
    assert (await world.ask("good.example")).addresses == [A]
    assert world.server.over_tcp == 1


async def test_a_forged_answer_is_passed_over(world: World) -> None:
    world.server.forges = True
    await world.guests.assign(assigned(allow("good.example")))
    assert (await world.ask("good.example")).addresses == [A]


async def test_no_answer_before_the_kernel_knows(world: World) -> None:
    world.kernel.gone = True
    await world.guests.assign(assigned(allow("good.example")))
    assert (await world.ask("good.example")).code == "SERVFAIL"


async def test_many_addresses_fit_the_smallest_datagram(world: World) -> None:
    name = ".".join(["a" * 30] * 8)
    world.server.has(name, AAAA=[f"2001:db8::{n:x}" for n in range(1, 30)])
    await world.guests.assign(assigned(allow(name)))
    wire = await world.ask_raw(dns.message.make_query(name, "AAAA").to_wire())
    assert len(wire) <= 512
    assert len(dns.message.from_wire(wire).answer[0]) == 8
    assert len(world.reachable()) == 8


async def test_what_stays_allowed_is_told_and_put_back(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example"), allow("other.example")))
    await world.ask("good.example")
    await world.ask("other.example")
    world.kernel.maps.clear()
    held = await world.guests.assign(assigned(allow("good.example", Span("tcp", 22, 22))))
    assert [(h.address, h.spans) for h in held] == [
        (bytes([203, 0, 113, 10]), (PortSpan(6, 22, 22),))
    ]
    assert set(world.reachable()) == {A}
    world.kernel.maps.clear()
    await world.guests.refill("127.0.0.1")
    assert world.reachable() == {A: (PortSpan(6, 22, 22),)}
    assert (await world.ask("other.example")).code == "NXDOMAIN"


async def test_an_address_taken_over_by_another_sandbox_brings_nothing_along(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    await world.ask("good.example")
    assert await world.guests.assign(assigned(allow("good.example"), sandbox="sb-9")) == ()
    world.guests.forget("127.0.0.1")
    assert world.guests.at("127.0.0.1") is None
