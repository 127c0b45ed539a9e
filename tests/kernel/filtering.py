"""A slot's filter for tests: run on single packets, or on a real pair of devices."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TypeVar

from dsec.linux import mounts, net, network_filter
from dsec.linux.mounts import MountFlag
from dsec.linux.net import VethEnd, netlink
from dsec.linux.network_filter import (
    OBJECT,
    Denial,
    Denials,
    Network,
    PortSpan,
    Programs,
    SlotSettings,
)

T = TypeVar("T")
Rules = dict[Network, tuple[PortSpan, ...]]
OWN4, OWN6 = "100.96.0.9", "fd64:5ec::9"
GATEWAY4, GATEWAY6 = "100.96.0.1", "fd64:5ec::1"
AWAY4, AWAY6 = "198.51.100.2", "2001:db8:1::2"
PROXY_PORT = 3128
PATIENCE_S = 20.0
PASSES, DROPS, REDIRECTS = 0, 2, 7
SLOT = 7
DEVICE, LINK = "eth0", "s7"
_BUILT = Path(__file__).parents[2] / "native/target/bpf"
_BPF = {"x86_64": 321, "aarch64": 280}
_TEST_RUN = 10
_CONTEXT_BYTES, _MARK_AT = 192, 8
_libc = ctypes.CDLL(None, use_errno=True)


def tcp(low: int, high: int | None = None, *, inspect: bool = False) -> PortSpan:
    return PortSpan(6, low, low if high is None else high, inspect)


def udp(low: int, high: int | None = None) -> PortSpan:
    return PortSpan(17, low, low if high is None else high)


PING = PortSpan(1, 0, 65535)
ANY = (tcp(0, 65535), udp(0, 65535), PING)
EVERYWHERE: Rules = {IPv4Network("0.0.0.0/0"): ANY, IPv6Network("::/0"): ANY}


def object_file() -> Path:
    """The filter, compiled; another build than the tree's by DSEC_BPF."""
    path = Path(os.environ.get("DSEC_BPF") or _BUILT) / OBJECT
    assert path.exists(), f"{path} is missing: bpf/build {_BUILT}"
    return path


def settings(*, six: bool = True) -> SlotSettings:
    return SlotSettings(
        slot=SLOT,
        address4=ip_address(OWN4).packed,
        address6=ip_address(OWN6).packed if six else bytes(16),
        gateway4=ip_address(GATEWAY4).packed,
        gateway6=ip_address(GATEWAY6).packed if six else bytes(16),
        proxy_port=PROXY_PORT,
    )


@dataclass(frozen=True)
class Filter:
    """A loaded filter."""

    pins: Path
    shared: Path
    programs: Programs
    denials: Denials

    def allow(self, *spans: PortSpan) -> None:
        """These ports of every address, and nothing else."""
        network_filter.apply(self.pins, dict.fromkeys(EVERYWHERE, spans))

    def next_denial(self) -> Denial:
        """The next one that is told; waits for it."""
        ready, _, _ = select.select([self.denials], [], [], PATIENCE_S)
        assert ready, "nothing was denied"
        denial, *_ = self.denials.read()
        return denial

    def sends(self, packet: bytes) -> tuple[int, bytes, int]:
        """What becomes of a packet from the sandbox: verdict, packet, mark."""
        return run(self.programs.from_sandbox, packet)

    def gets(self, packet: bytes) -> tuple[int, bytes, int]:
        """What becomes of a packet to it."""
        return run(self.programs.to_sandbox, packet)


@contextlib.contextmanager
def bpf_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bpf") as directory:
        place = Path(directory)
        flags = MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC
        mounts.mount("bpf", place, "bpf", flags, "mode=0700")
        try:
            yield place
        finally:
            mounts.umount(place, detach=True)


@contextlib.contextmanager
def loaded(*, six: bool = True) -> Iterator[Filter]:
    """A filter without a policy. Its node never lets anybody reach 192.0.2.0/24."""
    with bpf_directory() as place:
        pins, shared = place / "7", place / "node"
        pins.mkdir()
        shared.mkdir()
        network_filter.set_never(shared, [IPv4Network("192.0.2.0/24"), IPv6Network("fe80::/10")])
        with network_filter.load(object_file(), settings(six=six), pins, shared) as programs:
            with contextlib.closing(Denials(shared)) as denials:
                yield Filter(pins, shared, programs, denials)


def run(program: int, packet: bytes) -> tuple[int, bytes, int]:
    """Have the kernel run a classifier on a packet: verdict, packet and mark then."""
    given = ctypes.create_string_buffer(packet, len(packet))
    got = ctypes.create_string_buffer(len(packet) + 256)
    before = ctypes.create_string_buffer(_CONTEXT_BYTES)
    after = ctypes.create_string_buffer(_CONTEXT_BYTES)
    attributes = ctypes.create_string_buffer(
        struct.pack(
            "=IIIIQQIIIIQQ",
            program, 0, len(packet), len(got),
            ctypes.addressof(given), ctypes.addressof(got),
            1, 0, _CONTEXT_BYTES, _CONTEXT_BYTES,
            ctypes.addressof(before), ctypes.addressof(after),
        )
    )  # fmt: skip
    result = _libc.syscall(_BPF[platform.machine()], _TEST_RUN, attributes, 64)
    assert result == 0, os.strerror(ctypes.get_errno())
    verdict, _, size = struct.unpack_from("=III", attributes, 4)
    mark: int = struct.unpack_from("=I", after, _MARK_AT)[0]
    return verdict, got.raw[:size], mark


# Packets.


def checksum(data: bytes) -> int:
    """Of a header or more that has its own field: 0 is right."""
    total: int = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ethernet(body: bytes, kind: int | None = None, tag: bytes = b"") -> bytes:
    kind = (0x0800 if body[0] >> 4 == 4 else 0x86DD) if kind is None else kind
    return bytes(12) + tag + struct.pack("!H", kind) + body


def ip4(
    body: bytes,
    protocol: int,
    source: str = OWN4,
    target: str = AWAY4,
    *,
    fragment: int = 0,
    options: bytes = b"",
    total: int | None = None,
) -> bytes:
    size = 20 + len(options) + len(body) if total is None else total
    head = 0x45 + len(options) // 4
    ends = ip_address(source).packed + ip_address(target).packed
    parts = struct.pack("!BBHHHBBH", head, 0, size, 1, fragment, 64, protocol, 0) + ends + options
    return parts[:10] + struct.pack("!H", checksum(parts)) + parts[12:] + body


def ip6(
    body: bytes, protocol: int, source: str = OWN6, target: str = AWAY6, size: int | None = None
) -> bytes:
    told = len(body) if size is None else size
    ends = ip_address(source).packed + ip_address(target).packed
    return struct.pack("!IHBB", 6 << 28, told, protocol, 64) + ends + body


SYN, ACK, RST, FIN = 0x02, 0x10, 0x04, 0x01


def segment(
    source: int = 40000,
    target: int = 443,
    flags: int = SYN,
    *,
    seq: int = 1000,
    ack: int = 0,
    body: bytes = b"",
    offset: int = 5,
) -> bytes:
    head = struct.pack("!HHIIBBHHH", source, target, seq, ack, offset << 4, flags, 8192, 0, 0)
    return head + body


def datagram(source: int = 40000, target: int = 443, body: bytes = b"x", size: int = -1) -> bytes:
    told = 8 + len(body) if size < 0 else size
    return struct.pack("!HHHH", source, target, told, 0) + body


def icmp(kind: int, code: int = 0, body: bytes = b"") -> bytes:
    return struct.pack("!BBHI", kind, code, 0, 0) + body


def tcp_sum(packet: bytes) -> int:
    """Of the TCP of a frame with its pseudo header: 0 is right."""
    four = packet[12:14] == b"\x08\x00"
    ends, body = (packet[26:34], packet[34:]) if four else (packet[22:54], packet[54:])
    return checksum(ends + struct.pack("!II", len(body), 6) + body)


def back4(body: bytes, protocol: int, source: str = AWAY4, *, fragment: int = 0) -> bytes:
    return ethernet(ip4(body, protocol, source, OWN4, fragment=fragment))


def back6(body: bytes, protocol: int, source: str = AWAY6) -> bytes:
    return ethernet(ip6(body, protocol, source, OWN6))


TCP4, TCP6 = ethernet(ip4(segment(), 6)), ethernet(ip6(segment(), 6))
UDP4, UDP6 = ethernet(ip4(datagram(), 17)), ethernet(ip6(datagram(), 17))
LONGER = struct.pack("!BBBBI", 6, 0, 1, 4, 0)
"""An IPv6 extension header before TCP; its option is padding."""


def shown(value: object) -> str | None:
    """A short name of a packet."""
    return value[12:].hex()[:96] if isinstance(value, bytes) else None


# A real pair of devices.


class Pair:
    """A slot, and a router whose loopback device has the addresses of the world beyond."""

    def __init__(self, made: Filter, slot: Path, router: Path) -> None:
        self.filter = made
        self._slot = slot
        self._router = router

    def inside(self, work: Callable[[], T]) -> T:
        return net.in_namespace(self._slot, work)

    def outside(self, work: Callable[[], T]) -> T:
        return net.in_namespace(self._router, work)

    def listen(self, address: str, port: int = 0) -> socket.socket:
        """A listener beyond the filter."""
        return self.outside(lambda: _bound(address, port, socket.SOCK_STREAM))

    def receiver(self, address: str, port: int = 0) -> socket.socket:
        """A socket for datagrams there."""
        return self.outside(lambda: _bound(address, port, socket.SOCK_DGRAM))

    def sender(self, address: str) -> socket.socket:
        """A socket for datagrams in the slot."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made = self.inside(lambda: socket.socket(family, socket.SOCK_DGRAM))
        made.settimeout(PATIENCE_S)
        return made

    def connect(self, listener: socket.socket) -> socket.socket:
        """Connect from the slot. Raises ConnectionRefusedError: it was denied."""
        name = listener.getsockname()
        return self.inside(lambda: socket.create_connection(name[:2], PATIENCE_S))

    def joined(self, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        """Both ends of a new connection: the slot's, the other."""
        here = self.connect(listener)
        there, _ = listener.accept()
        there.settimeout(PATIENCE_S)
        return here, there

    def inject(self, frame: bytes) -> None:
        """Send a handmade frame from the slot, to the router's hardware address."""

        def work() -> None:
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
                raw.bind((DEVICE, 0))
                raw.send(bytes.fromhex(MACS[1].replace(":", "")) + frame[6:])

        self.inside(work)


MACS = "02:00:00:00:00:09", "02:00:00:00:00:01"


def _bound(address: str, port: int, kind: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    made.settimeout(PATIENCE_S)
    made.bind((address, port))
    if kind == socket.SOCK_STREAM:
        made.listen()
    return made


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    """A slot behind its filter."""
    with loaded() as made, tempfile.TemporaryDirectory(prefix="pair") as directory:
        slot, router = Path(directory) / "slot", Path(directory) / "router"
        with contextlib.ExitStack() as undo:
            for place in (router, slot):
                net.in_new_namespace(place, _quiet)
                undo.callback(net.remove_namespace, place)
            net.in_namespace(slot, lambda: _furnish_slot(router))
            net.in_namespace(router, lambda: _furnish_router(made.programs))
            both = Pair(made, slot, router)
            _wait_until_up(both)
            yield both


def _wait_until_up(pair: Pair) -> None:
    """A new device drops what is sent until its kernel has taken note of the other end."""
    with pair.receiver(GATEWAY4, 53) as there, pair.sender(GATEWAY4) as here:
        here.connect(there.getsockname())
        here.settimeout(0.02)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            here.send(b"?")
            with contextlib.suppress(TimeoutError):
                there.settimeout(0.02)
                _, sender = there.recvfrom(1)
                there.sendto(b"!", sender)
                here.recv(1)
                return
    raise AssertionError("the devices did not come up")


def _quiet() -> None:
    for name, value in (("accept_dad", "0"), ("addr_gen_mode", "1"), ("accept_ra", "0")):
        net.set_sysctl(f"ipv6/conf/default/{name}", value)


def _furnish_slot(router: Path) -> None:
    with netlink() as link:
        link.add_veth(VethEnd(DEVICE, MACS[0], 1500), VethEnd(LINK, MACS[1], 1500), router)
        index = socket.if_nametoindex(DEVICE)
        link.set_up(index, arp=False)
        for own, gateway in ((OWN4, GATEWAY4), (OWN6, GATEWAY6)):
            address, via = ip_address(own), ip_address(gateway)
            link.add_address(index, address, address.max_prefixlen)
            link.add_neighbour(index, via, MACS[1])
            link.add_route(net.everywhere(address.version), index, via)


def _furnish_router(programs: Programs) -> None:
    with netlink() as link:
        index, loopback = socket.if_nametoindex(LINK), socket.if_nametoindex("lo")
        link.add_hooks(index)
        link.attach_filter(index, "ingress", programs.from_sandbox, "from_sandbox")
        link.attach_filter(index, "egress", programs.to_sandbox, "to_sandbox")
        link.set_up(loopback)
        link.set_up(index, arp=False)
        for text in (GATEWAY4, GATEWAY6, AWAY4, AWAY6, "192.0.2.7"):
            address = ip_address(text)
            link.add_address(loopback, address, address.max_prefixlen)
        for text in (OWN4, OWN6):
            link.add_neighbour(index, ip_address(text), MACS[0])
            link.add_route(ip_network(text), index)
