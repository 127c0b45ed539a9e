"""What has no socket: rates, what was given, counting of denials, the host's resolvers."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from dsec.edge.network.policy import Span
from dsec.edge.network.warden.denials import Denials
from dsec.edge.network.warden.given import Given
from dsec.edge.network.warden.rates import Bucket, Questions, entropy_bits
from dsec.edge.network.warden.reach import port_spans
from dsec.edge.network.warden.settings import Limits, Settings
from dsec.edge.network.warden.survival import survived
from dsec.edge.network.warden.upstream import Servers, parse_resolv_conf, parse_server
from tests.unit.edge.warden.world import SetClock

ONE, TWO = ip_address("203.0.113.1"), ip_address("203.0.113.2")


def test_a_bucket_fills_with_time() -> None:
    bucket = Bucket(2.0, 3.0, 0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(1.0) for _ in range(3)] == [True, True, False]
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]


def test_what_is_remembered_of_wildcards_is_bounded() -> None:
    questions = Questions(Limits(wildcard_names_per_minute=2), 0.0)
    for n in range(1000):
        assert questions.may_ask_below(f"*.w{n}.example", "x", 0.0)
    assert len(questions._wildcards) == 64
    assert [questions.may_ask_below("*.w", f"n{n}", 0.0) for n in range(4)] == [
        True,
        True,
        False,
        False,
    ]


def test_entropy() -> None:
    assert entropy_bits("") == 0
    assert entropy_bits("aaaaaaaa") == 0
    assert entropy_bits("abcdefgh") == 24


def test_what_was_given_ends_and_is_bounded() -> None:
    given = Given(2)
    given.add("a", [ONE], 10.0)
    assert given.has("a", ONE, 9.0)
    assert not given.has("a", ONE, 10.0)
    assert not given.has("a", TWO, 9.0)
    given.add("a", [ONE], 5.0)
    assert given.has("a", ONE, 9.0)  # a shorter answer takes nothing away
    given.add("b", [ONE, TWO], 20.0)
    assert given.names_of(ONE, 9.0) == ["a", "b"]
    given.add("c", [TWO], 20.0)
    assert given.names_of(ONE, 9.0) == ["b"]
    given.add("c", [ip_address(n) for n in range(100)], 20.0)
    assert len(given.held(lambda _: (Span("tcp", 1, 1),), 0.0)) <= 34


def test_spans_beyond_what_the_kernel_takes_are_left_out() -> None:
    many = [Span("tcp", n, n) for n in range(1000, 1040, 2)]
    assert len(port_spans(many)) == 16


def test_denials_are_counted_together_and_bounded() -> None:
    clock = SetClock()
    denials = Denials(Limits(denials_kinds=2), clock)
    sandbox = "sb-1", "127.0.0.1"
    denials.note(sandbox, "name", name="a")
    clock.at += 1
    denials.note(sandbox, "name", name="a")
    for n in range(50):
        denials.note(sandbox, "name", name=f"n{n}" + "x" * 500)
    (told,) = denials.take()
    assert [(e.name[:2], len(e.name), e.count) for e in told.events] == [
        ("a", 1, 2),
        ("n0", 255, 1),
        ("", 0, 49),
    ]
    assert (told.events[0].first_at, told.events[0].last_at) == (1000.0, 1001.0)
    assert denials.take() == []


def test_resolv_conf() -> None:
    text = "# x\nnameserver 192.0.2.1\nnameserver fe80::1%eth0\nnameserver\nsearch a\n" + (
        "nameserver 2001:db8::1 \n" * 5
    )
    assert parse_resolv_conf(text) == (("192.0.2.1", 53), ("2001:db8::1", 53), ("2001:db8::1", 53))


def test_a_configured_resolver() -> None:
    assert parse_server("192.0.2.1#5353") == ("192.0.2.1", 5353)
    assert parse_server("2001:db8::1") == ("2001:db8::1", 53)
    for wrong in ("", "host", "192.0.2.1#x"):
        with pytest.raises(ValueError, match=r"resolver|int"):
            parse_server(wrong)


async def test_the_hosts_resolvers_are_read_again_when_they_change(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 192.0.2.1\n")
    clock = SetClock()
    servers = Servers(Settings(gateway4="127.0.0.1", resolv_conf=str(file)), clock)
    assert await servers.current() == (("192.0.2.1", 53),)
    new = tmp_path / "new"
    new.write_text("nameserver 192.0.2.2\n")
    new.replace(file)
    assert await servers.current() == (("192.0.2.1", 53),)
    clock.at += 6
    assert await servers.current() == (("192.0.2.2", 53),)
    file.unlink()
    clock.at += 6
    assert await servers.current() == (("192.0.2.2", 53),)  # better than none


def _fail() -> None:
    raise RuntimeError("s3cret")


def test_what_nobody_foresaw_is_logged_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    with survived("a test"):
        _fail()
    assert [record.message for record in caplog.records] == ["failed"]
    assert "s3cret" not in str(vars(caplog.records[0]))
