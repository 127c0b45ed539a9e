"""Networks for tests: a filter that lets everything through, and a world beyond the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path

from dsec.linux import net
from dsec.linux.net import Netlink, VethEnd, netlink
from dsec.linux.network_filter import INSPECT_MARK, Programs, SlotSettings

WORLD = "198.51.100.2"
"""Somebody beyond the host."""
HOST_THERE = "198.51.100.1"
WORLD6, HOST_THERE6 = "2001:db8:77::2", "2001:db8:77::1"
PATIENCE_S = 20.0
_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _OBJ_PIN = 5, 6
_SCHED_CLS = 3
_libc = ctypes.CDLL(None, use_errno=True)


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = _libc.syscall(_BPF[platform.machine()], command, buffer, len(attributes))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"bpf {command}: {os.strerror(number)}")
    return int(result)


def _load(code: bytes) -> int:
    program = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "<IIQQ", _SCHED_CLS, len(code) // 8, ctypes.addressof(program), ctypes.addressof(licence)
    )
    return _bpf(_PROG_LOAD, attributes + bytes(64))


_INSTRUCTION = struct.Struct("<BBhi")
_PASS = _INSTRUCTION.pack(0xB7, 0, 0, 0) + _INSTRUCTION.pack(0x95, 0, 0, 0)
_MARK = _INSTRUCTION.pack(0xB7, 2, 0, INSPECT_MARK) + _INSTRUCTION.pack(0x63, 0x21, 8, 0)
"""Into register 2, and from there to the packet's mark."""


def pin(descriptor: int, path: Path) -> None:
    name = ctypes.create_string_buffer(os.fsencode(path))
    _bpf(_OBJ_PIN, struct.pack("<QII", ctypes.addressof(name), descriptor, 0))


@contextlib.contextmanager
def passing(settings: SlotSettings, pins: Path, shared: Path) -> Iterator[Programs]:
    """In place of a slot's filter: lets everything through, and leaves something pinned."""
    with _programs(_PASS, pins, shared) as programs:
        yield programs


@contextlib.contextmanager
def inspecting(settings: SlotSettings, pins: Path, shared: Path) -> Iterator[Programs]:
    """In place of a slot's filter: marks everything for inspection."""
    with _programs(_MARK + _PASS, pins, shared) as programs:
        yield programs


@contextlib.contextmanager
def _programs(code: bytes, pins: Path, shared: Path) -> Iterator[Programs]:
    assert shared.is_dir()
    program = _load(code)
    try:
        pin(program, pins / "program")
        yield Programs(program, program)
    finally:
        os.close(program)


@contextlib.contextmanager
def world(directory: Path, name: str) -> Iterator[Path]:
    """A network namespace with an address that the host reaches; its path."""
    place = directory / "world"
    device = f"w{name}"

    def furnish() -> None:
        with netlink() as there:
            inside = VethEnd("eth0", "02:00:00:00:00:02", 1500, 2)
            outside = VethEnd(device, "02:00:00:00:00:01", 1500)
            there.add_veth(inside, outside, Path("/proc/self/ns/net"))
            _join(there, 2, [(WORLD, HOST_THERE), (WORLD6, HOST_THERE6)])

    net.in_new_namespace(place, furnish)
    try:
        with netlink() as host:
            link = host.link(device)
            assert link is not None
            _join(host, link.index, [(HOST_THERE, WORLD), (HOST_THERE6, WORLD6)])
        yield place
    finally:
        with netlink() as host:
            if link := host.link(device):
                host.remove_link(link.index)
        net.remove_namespace(place)


def _join(link: Netlink, device: int, pairs: list[tuple[str, str]]) -> None:
    """Set one end up: its own addresses, and ways to those at the other end."""
    link.set_up(device)
    for own, other in pairs:
        address, network = ip_address(own), ip_network(other)
        link.add_address(device, address, address.max_prefixlen)
        link.add_route(network, device)


def listen(where: Path | None, address: str) -> socket.socket:
    """A TCP listener in a namespace; None = the host's."""

    def work() -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family)
        listener.bind((address, 0))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        return listener

    return work() if where is None else net.in_namespace(where, work)


def connect(where: Path, address: str, port: int, timeout_s: float) -> socket.socket:
    """Connect from inside a namespace."""

    def work() -> socket.socket:
        return socket.create_connection((address, port), timeout_s)

    return net.in_namespace(where, work)
