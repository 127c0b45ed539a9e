"""A slot's filter on real connections."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from ipaddress import IPv4Network, ip_address

import pytest

from dsec.linux import network_filter
from dsec.linux.network_filter import Reason
from tests.kernel.filtering import (
    ANY,
    AWAY4,
    AWAY6,
    EVERYWHERE,
    GATEWAY4,
    LONGER,
    OWN4,
    UDP4,
    Pair,
    Rules,
    datagram,
    ethernet,
    ip4,
    ip6,
    pair,
    segment,
    shown,
    tcp,
    udp,
)

pytestmark = pytest.mark.needs_root

AWAY = ip_address(AWAY4).packed
BIG = 4 << 20
"""More than all buffers of a connection hold."""


@pytest.fixture
def joined() -> Iterator[Pair]:
    with pair() as made:
        yield made


@pytest.mark.parametrize("address", [AWAY4, AWAY6])
def test_a_connection_is_made_or_refused_at_once(joined: Pair, address: str) -> None:
    with joined.listen(address) as listener:
        with pytest.raises(ConnectionRefusedError):
            joined.connect(listener)
        joined.filter.allow(tcp(listener.getsockname()[1]))
        joined.connect(listener).close()


@pytest.mark.parametrize("address", [AWAY4, AWAY6])
def test_connections_are_cut_when_they_are_used(joined: Pair, address: str) -> None:
    with joined.listen(address) as listener:
        joined.filter.allow(*ANY)
        sends, receives = joined.joined(listener), joined.joined(listener)
        for here, there in (sends, receives):
            there.sendall(b"hello")
            assert here.recv(5) == b"hello"
        joined.filter.allow()
        sends[0].sendall(b"more")
        with pytest.raises(ConnectionResetError):
            sends[0].recv(1)
        receives[1].sendall(b"more")
        with pytest.raises(ConnectionResetError):
            receives[0].recv(1)
        for each in (*sends, *receives):
            each.close()


@pytest.mark.parametrize("address", [AWAY4, AWAY6])
def test_streams_of_large_packets_pass_and_are_cut(joined: Pair, address: str) -> None:
    """What is longer than a packet may be travels in one piece, and is one to the filter."""
    with joined.listen(address) as listener:
        joined.filter.allow(*ANY)
        here, there = joined.joined(listener)
        for source, target in ((here, there), (there, here)):
            assert _through(source, target, BIG) == BIG
        counted = network_filter.counters(joined.filter.pins)
        assert counted.sent_packets > BIG // 1500
        assert counted.denied_packets == 0
        reading = threading.Thread(target=_drain, args=(there,))
        reading.start()
        here.sendall(bytes(BIG))
        joined.filter.allow()
        with pytest.raises(ConnectionResetError):
            _send_for_ever(here)
        there.shutdown(socket.SHUT_RDWR)
        reading.join()
        here.close()
        there.close()


def _through(source: socket.socket, target: socket.socket, size: int) -> int:
    sending = threading.Thread(target=source.sendall, args=(bytes(size),))
    sending.start()
    got = 0
    while got < size:
        got += len(target.recv(1 << 16))
    sending.join()
    return got


def _drain(source: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while source.recv(1 << 16):
            pass


def _send_for_ever(target: socket.socket) -> None:
    while True:
        target.sendall(bytes(1 << 16))


@pytest.mark.parametrize("address", [AWAY4, AWAY6])
def test_datagrams(joined: Pair, address: str) -> None:
    with joined.receiver(address) as there, joined.sender(address) as here:
        target = there.getsockname()
        here.sendto(b"denied", target)
        denial = joined.filter.next_denial()
        assert (denial.reason, denial.protocol, denial.port) == ("rule", 17, target[1])
        joined.filter.allow(udp(target[1]))
        here.sendto(b"passes", target)
        data, sender = there.recvfrom(100)
        assert data == b"passes"
        there.sendto(b"answer", sender)
        assert here.recv(100) == b"answer"


def test_the_gateway_is_there_without_rules(joined: Pair) -> None:
    with joined.receiver(GATEWAY4, 53) as there, joined.sender(GATEWAY4) as here:
        here.sendto(b"question", there.getsockname())
        _, sender = there.recvfrom(100)
        there.sendto(b"answer", sender)
        assert here.recv(100) == b"answer"
    joined.filter.allow(*ANY)
    with joined.listen(GATEWAY4) as listener, pytest.raises(ConnectionRefusedError):
        joined.connect(listener)


def test_a_closed_port_is_told_by_the_error_of_it(joined: Pair) -> None:
    joined.filter.allow(udp(9))
    with joined.sender(AWAY4) as here:
        here.connect((AWAY4, 9))
        here.send(b"x")
        with pytest.raises(ConnectionRefusedError):
            here.recv(1)


def test_nobody_connects_to_a_sandbox(joined: Pair) -> None:
    joined.filter.allow(*ANY)
    with joined.listen(AWAY4) as listener:
        joined.connect(listener).close()
    attempt = joined.outside(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    with attempt:
        attempt.setblocking(False)
        assert attempt.connect_ex((OWN4, 22)) == errno.EINPROGRESS
        denial = joined.filter.next_denial()
    assert (denial.reason, denial.inbound) == ("rule", True)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (ethernet(ip4(datagram(), 17, source="100.96.0.10")), "spoofed"),
        (ethernet(ip4(datagram(), 17), tag=b"\x81\0\0\5"), "malformed"),
        (ethernet(ip4(datagram(), 17), tag=b"\x81\0\0\0"), "malformed"),
        (ethernet(ip4(datagram(), 17), tag=b"\x88\xa8\0\5\x81\0\0\5"), "malformed"),
        (ethernet(ip4(datagram(), 17, fragment=0x2000)), "fragment"),
        (ethernet(ip4(datagram(), 17, options=bytes(4))), "malformed"),
        (ethernet(ip6(LONGER + segment(), 0)), "malformed"),
        (ethernet(ip4(segment(), 132)), "protocol"),
        (ethernet(ip4(segment(), 6))[:33], "malformed"),
        (ethernet(ip6(segment(), 6))[:50], "malformed"),
        (ethernet(b"\x45"), "malformed"),
    ],
    ids=shown,
)
def test_handmade_frames(joined: Pair, frame: bytes, reason: Reason) -> None:
    joined.filter.allow(*ANY)
    with joined.receiver(AWAY4, 443) as there:
        joined.inject(UDP4)
        assert there.recv(10) == b"x"
        joined.inject(frame)
        assert joined.filter.next_denial().reason == reason


def test_connections_go_on_while_policies_change(joined: Pair) -> None:
    """Both policies allow them: at no moment is there none, or half of one."""
    changes = 200
    with joined.listen(AWAY4) as listener:
        joined.filter.allow(*ANY)
        network_filter.name_add(joined.filter.pins, AWAY, [tcp(1)], 600)
        here, there = joined.joined(listener)
        sending = threading.Thread(target=_until_closed, args=(here,))
        reading = threading.Thread(target=_drain, args=(there,))
        sending.start()
        reading.start()
        for number in range(changes):
            rules: Rules = {IPv4Network((10 << 24 | number << 8, 24)): (), **EVERYWHERE}
            network_filter.apply(joined.filter.pins, rules, lambda _, spans: spans)
        assert network_filter.counters(joined.filter.pins).denied_packets == 0
        assert list(network_filter.names(joined.filter.pins)) == [AWAY]
        here.shutdown(socket.SHUT_RDWR)
        sending.join()
        reading.join()
        here.close()
        there.close()


def _until_closed(target: socket.socket) -> None:
    with contextlib.suppress(BrokenPipeError):
        _send_for_ever(target)
