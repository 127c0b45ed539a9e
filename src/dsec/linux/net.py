"""Network namespaces, links, addresses, routes, packet filters: the only place that speaks netlink.

What works in a namespace runs in a thread made for it, which ends with the work: a thread that is in
another namespace is never given back to anybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from pathlib import Path
from typing import Literal, TypeVar

from dsec.linux import mounts, process, rtnetlink
from dsec.linux.mounts import MountFlag
from dsec.linux.rtnetlink import CREATE, EXCLUSIVE, REPLACE, Request

T = TypeVar("T")
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_CLONE_NEWNET = 0x40000000
_SYSCTLS = Path("/proc/sys/net")
_OWN = "/proc/thread-self/ns/net"
_NFT_TIMEOUT_S = 30.0

# Of <linux/rtnetlink.h> and its likes.
_NEWLINK, _DELLINK, _GETLINK, _SETLINK = 16, 17, 18, 19
_NEWADDR, _GETADDR = 20, 22
_NEWROUTE, _GETROUTE, _NEWNEIGH, _NEWRULE = 24, 26, 28, 32
_NEWQDISC, _NEWFILTER = 36, 44
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBi")  # family, length, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, length, -, tos, table, protocol, scope, type, flags
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
_FILTER = struct.Struct("=BxxxiIII")  # family, index, handle, parent, info
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK, _IFLA_LINKINFO = 1, 3, 4, 5, 18
_IFLA_GROUP, _IFLA_NET_NS_FD, _IFLA_NUM_TX_QUEUES, _IFLA_NUM_RX_QUEUES = 27, 28, 31, 32
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_IFF_UP, _IFF_NOARP = 0x1, 0x80
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_NODAD, _IFA_F_NOPREFIXROUTE = 0x02, 0x200
_NDA_DST, _NDA_LLADDR, _PERMANENT = 1, 2, 0x80
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_METRICS, _RTA_TABLE, _RTAX_MTU = 1, 4, 5, 8, 15, 2
_UNICAST, _LOCAL, _UNREACHABLE = 1, 2, 7
_SCOPE_LINK, _SCOPE_HOST = 253, 254
_STATIC, _MAIN, _ONLINK = 4, 254, 4
_FRA_PRIORITY, _FRA_FWMARK, _FRA_TABLE, _TO_TABLE = 6, 10, 15, 1
_RULE_PRIORITY = 32000
_TCA_KIND, _TCA_OPTIONS = 1, 2
_BPF_FD, _BPF_NAME, _BPF_FLAGS, _DIRECT_ACTION = 6, 7, 8, 1
_CLSACT_HANDLE, _CLSACT = 0xFFFF0000, 0xFFFFFFF1
_HOOKS = {"ingress": 0xFFFFFFF2, "egress": 0xFFFFFFF3}
_ETH_P_ALL = 0x0003
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.unshare.argtypes = [ctypes.c_int]
_libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]


def _check(result: int, call: str, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", path)


# Namespaces.


def in_namespace(path: Path, work: Callable[[], T]) -> T:
    """Run something, in a thread of its own, in the network namespace a path stands for. Blocks.

    Raises:
        OSError: it is not one, or may not be entered; else whatever `work` raises.
    """

    def entered() -> T:
        _enter(path)
        return work()

    return _in_thread_of_its_own(entered)


def in_new_namespace(path: Path, work: Callable[[], T]) -> T:
    """Make a network namespace that stays at a path, and run something in it.

    If that fails, nothing stays but what `work` itself left elsewhere.

    Raises:
        OSError: it cannot be made; else whatever `work` raises.
    """

    def make() -> T:
        _check(_libc.unshare(_CLONE_NEWNET), "unshare CLONE_NEWNET", str(path))
        path.touch(mode=0o600)
        with contextlib.ExitStack() as undo:
            undo.callback(remove_namespace, path)
            mounts.mount(_OWN, path, "", MountFlag.BIND)
            made = work()
            undo.pop_all()
        return made

    return _in_thread_of_its_own(make)


def remove_namespace(path: Path) -> None:
    """Take a namespace from its path; it ends when nobody is in it. Nothing there is no error.

    Raises:
        OSError: it cannot be unmounted.
    """
    while is_namespace(path):
        mounts.umount(path, detach=True)
    path.unlink(missing_ok=True)


def is_namespace(path: Path) -> bool:
    """Whether a namespace is kept at a path. Does not read the list of all mounts."""
    try:
        return path.lstat().st_dev != path.parent.lstat().st_dev
    except FileNotFoundError:
        return False


def _enter(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(descriptor, _CLONE_NEWNET), "setns CLONE_NEWNET", str(path))
    finally:
        os.close(descriptor)


def _in_thread_of_its_own(work: Callable[[], T]) -> T:
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as exc:  # noqa: BLE001 - raised by whoever waits
            failed.append(exc)

    thread = threading.Thread(target=run, name="netns", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def has_sysctl(name: str) -> bool:
    """Whether the kernel has a setting, by its path below /proc/sys/net."""
    return (_SYSCTLS / name).exists()


def sysctl(name: str) -> str:
    """Read one of the calling thread's namespace.

    Raises:
        OSError: there is none.
    """
    return (_SYSCTLS / name).read_text().strip()


def set_sysctl(name: str, value: str) -> None:
    """Set one of the calling thread's namespace.

    Raises:
        OSError: there is none, or /proc/sys is read-only.
    """
    (_SYSCTLS / name).write_text(value)


# Netlink.


@dataclass(frozen=True, slots=True)
class Link:
    """A network device."""

    index: int
    name: str
    mac: str
    mtu: int
    peer: int
    """Index of a veth's other end in that one's namespace; 0 = no such thing."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way to a network."""

    network: Network
    device: int
    """Index of its link; 0 = none."""
    mtu: int = 0
    """0 = the link's."""
    table: int = _MAIN


@dataclass(frozen=True, slots=True)
class VethEnd:
    """One end of a veth pair as it shall be."""

    name: str
    mac: str
    mtu: int
    index: int = 0
    """0 = the kernel chooses."""


class Netlink:
    """A netlink socket of the namespace that its maker was in. Every method may raise OSError."""

    def __init__(self) -> None:
        self._socket = rtnetlink.Socket()
        self._later: list[Request] | None = None

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Changes inside are told to the kernel all at once, at the end: the first error is raised."""
        self._later = []
        try:
            yield
            changes = self._later
        finally:
            self._later = None
        if changes:
            self._socket.change(changes)

    def links(self) -> list[Link]:
        """All devices of the namespace."""
        return [_link(body) for body in self._socket.dump(_GETLINK, _LINK.pack(0, 0, 0, 0, 0))]

    def link(self, name: str) -> Link | None:
        """The device of a name, if there is one."""
        try:
            index = socket.if_nametoindex(name)
        except OSError:
            return None
        return next((link for link in self.links() if link.index == index), None)

    def add_veth(self, here: VethEnd, there: VethEnd, namespace: Path) -> None:
        """Make a pair with one end in another namespace, both down.

        One queue each: else they have one per processor of the host, and memory for it.
        """
        descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            peer = _end(there) + rtnetlink.number(_IFLA_NET_NS_FD, descriptor)
            info = rtnetlink.nested(
                _IFLA_LINKINFO,
                rtnetlink.text(_INFO_KIND, "veth"),
                rtnetlink.nested(_INFO_DATA, rtnetlink.attribute(_VETH_PEER, peer)),
            )
            new = Request(_NEWLINK, CREATE | EXCLUSIVE, _end(here) + info, f"add veth {here.name}")
            self._socket.change([new])
        finally:
            os.close(descriptor)

    def set_up(self, index: int, *, arp: bool = True) -> None:
        """Set a device up; without `arp` its kernel asks nobody for hardware addresses."""
        flags = _IFF_UP | (0 if arp else _IFF_NOARP)
        body = _LINK.pack(0, 0, index, flags, _IFF_UP | _IFF_NOARP)
        self._change(_SETLINK, 0, body, f"set link {index} up")

    def remove_link(self, index: int) -> None:
        """Remove a device, and with a veth its other end, at once for whoever uses it."""
        self._change(_DELLINK, 0, _LINK.pack(0, 0, index, 0, 0), f"remove link {index}")

    def remove_links(self, indexes: Sequence[int], group: int) -> None:
        """Remove many devices in the time that one takes.

        Args:
            indexes: of devices there are.
            group: a number nobody else uses for a group of devices.
        """
        mark = rtnetlink.number(_IFLA_GROUP, group)
        with self.together():
            for index in indexes:
                body = _LINK.pack(0, 0, index, 0, 0) + mark
                self._change(_SETLINK, 0, body, f"set group of link {index}")
            self._change(_DELLINK, 0, _LINK.pack(0, 0, 0, 0, 0) + mark, f"remove group {group}")

    def add_address(self, index: int, address: Address, length: int) -> None:
        """Add an address, without a route to its network. One that is there is no error."""
        flags = rtnetlink.number(_IFA_FLAGS, _IFA_F_NODAD | _IFA_F_NOPREFIXROUTE)
        body = _address(index, address, length) + flags
        self._change(_NEWADDR, CREATE | REPLACE, body, f"add address {address}")

    def addresses(self, index: int | None = None) -> list[tuple[Address, int]]:
        """All addresses with the lengths of their networks; of one device if it is named."""
        found = []
        for body in self._socket.dump(_GETADDR, _ADDRESS.pack(0, 0, 0, 0, 0)):
            _, length, _, _, device = _ADDRESS.unpack_from(body)
            told = rtnetlink.attributes(body[_ADDRESS.size :])
            if index in (None, device):
                found.append((_parse_address(told.get(_IFA_LOCAL) or told[_IFA_ADDRESS]), length))
        return found

    def add_neighbour(self, index: int, address: Address, mac: str) -> None:
        """Say for good which hardware address somebody has."""
        body = (
            _NEIGHBOUR.pack(_FAMILIES[address.version], index, _PERMANENT, 0, 0)
            + rtnetlink.attribute(_NDA_DST, address.packed)
            + rtnetlink.attribute(_NDA_LLADDR, _mac(mac))
        )
        self._change(_NEWNEIGH, CREATE | REPLACE, body, f"add neighbour {address}")

    def add_route(
        self, network: Network, index: int, via: Address | None = None, *, claim: bool = False
    ) -> None:
        """Send a network to a device, through a neighbour that is told apart (`add_neighbour`).

        Raises:
            FileExistsError: with `claim`, if there is a way to exactly this network already.
        """
        scope, flags = (_SCOPE_LINK, 0) if via is None else (0, _ONLINK)
        hop = b"" if via is None else rtnetlink.attribute(_RTA_GATEWAY, via.packed)
        body = _route_body(network, scope=scope, flags=flags)
        body += rtnetlink.number(_RTA_OIF, index) + hop
        how = CREATE | (EXCLUSIVE if claim else REPLACE)
        self._change(_NEWROUTE, how, body, f"add route to {network}")

    def add_unreachable(self, network: Network) -> None:
        """Answer what goes to a network, and to no narrower one, with an error."""
        body = _route_body(network, kind=_UNREACHABLE)
        self._change(_NEWROUTE, CREATE | REPLACE, body, f"make {network} unreachable")

    def add_local_delivery(self, version: int, mark: int, table: int) -> None:
        """Deliver packets with a mark here, whatever their address: for transparent listeners."""
        everything = everywhere(version)
        route = _route_body(everything, kind=_LOCAL, scope=_SCOPE_HOST, table=table)
        route += rtnetlink.number(_RTA_OIF, socket.if_nametoindex("lo"))
        self._change(_NEWROUTE, CREATE | REPLACE, route, f"deliver {everything} here")
        rule = _ROUTE.pack(_FAMILIES[version], 0, 0, 0, 0, 0, 0, _TO_TABLE, 0)
        for kind, value in (
            (_FRA_PRIORITY, _RULE_PRIORITY),
            (_FRA_FWMARK, mark),
            (_FRA_TABLE, table),
        ):
            rule += rtnetlink.number(kind, value)
        with contextlib.suppress(FileExistsError):
            self._change(_NEWRULE, CREATE | EXCLUSIVE, rule, f"add rule for mark {mark:#x}")

    def routes(self) -> list[Route]:
        """Ways to networks in all tables, without those that come with the kernel's own addresses."""
        empty = _ROUTE.pack(0, 0, 0, 0, 0, 0, 0, 0, 0)
        bodies = self._socket.dump(_GETROUTE, empty)
        return [_route(body) for body in bodies if _ROUTE.unpack_from(body)[7] == _UNICAST]

    def add_hooks(self, index: int) -> None:
        """Give a device hooks for classifiers. It must have none."""
        body = _FILTER.pack(0, index, _CLSACT_HANDLE, _CLSACT, 0)
        body += rtnetlink.text(_TCA_KIND, "clsact")
        self._change(_NEWQDISC, CREATE | EXCLUSIVE, body, f"add clsact to link {index}")

    def attach_filter(
        self, index: int, direction: Literal["ingress", "egress"], program: int, name: str
    ) -> None:
        """Have an eBPF classifier (a descriptor) decide on what comes from, or goes to, a device.

        Needs `add_hooks` before.
        """
        info = 1 << 16 | socket.htons(_ETH_P_ALL)  # of priority 1
        options = rtnetlink.nested(
            _TCA_OPTIONS,
            rtnetlink.number(_BPF_FD, program),
            rtnetlink.text(_BPF_NAME, name),
            rtnetlink.number(_BPF_FLAGS, _DIRECT_ACTION),
        )
        body = _FILTER.pack(0, index, 1, _HOOKS[direction], info)
        body += rtnetlink.text(_TCA_KIND, "bpf") + options
        self._change(_NEWFILTER, CREATE | EXCLUSIVE, body, f"attach {name} to link {index}")

    def _change(self, kind: int, flags: int, body: bytes, what: str) -> None:
        request = Request(kind, flags, body, what)
        if self._later is None:
            self._socket.change([request])
        else:
            self._later.append(request)


@contextlib.contextmanager
def netlink() -> Iterator[Netlink]:
    """A netlink socket of the calling thread's namespace."""
    with contextlib.closing(Netlink()) as link:
        yield link


def everywhere(version: int) -> Network:
    """What a default route leads to."""
    return ip_network("0.0.0.0/0" if version == 4 else "::/0")


def _end(end: VethEnd) -> bytes:
    return (
        _LINK.pack(0, 0, end.index, 0, 0)
        + rtnetlink.text(_IFLA_IFNAME, end.name)
        + rtnetlink.attribute(_IFLA_ADDRESS, _mac(end.mac))
        + rtnetlink.number(_IFLA_MTU, end.mtu)
        + rtnetlink.number(_IFLA_NUM_TX_QUEUES, 1)
        + rtnetlink.number(_IFLA_NUM_RX_QUEUES, 1)
    )


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _address(index: int, address: Address, length: int) -> bytes:
    return (
        _ADDRESS.pack(_FAMILIES[address.version], length, 0, 0, index)
        + rtnetlink.attribute(_IFA_LOCAL, address.packed)
        + rtnetlink.attribute(_IFA_ADDRESS, address.packed)
    )


def _parse_address(packed: bytes) -> Address:
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


def _route_body(
    network: Network, *, kind: int = 1, scope: int = 0, table: int = _MAIN, flags: int = 0
) -> bytes:
    family = _FAMILIES[network.version]
    head = _ROUTE.pack(family, network.prefixlen, 0, 0, 0, _STATIC, scope, kind, flags)
    body = head + rtnetlink.number(_RTA_TABLE, table)
    if network.prefixlen:
        body += rtnetlink.attribute(_RTA_DST, network.network_address.packed)
    return body


def _link(body: bytes) -> Link:
    told = rtnetlink.attributes(body[_LINK.size :])
    return Link(
        index=_LINK.unpack_from(body)[2],
        name=told[_IFLA_IFNAME].rstrip(b"\0").decode("utf-8", "replace"),
        mac=told.get(_IFLA_ADDRESS, b"").hex(":"),
        mtu=_number(told.get(_IFLA_MTU)),
        peer=_number(told.get(_IFLA_LINK)),
    )


def _route(body: bytes) -> Route:
    family, length, _, _, table, *_ = _ROUTE.unpack_from(body)
    told = rtnetlink.attributes(body[_ROUTE.size :])
    version = 4 if family == _FAMILIES[4] else 6
    target = told.get(_RTA_DST)
    network = everywhere(version) if target is None else ip_network((target, length))
    metrics = rtnetlink.attributes(told.get(_RTA_METRICS, b""))
    return Route(
        network=network,
        device=_number(told.get(_RTA_OIF)),
        mtu=_number(metrics.get(_RTAX_MTU)),
        table=_number(told.get(_RTA_TABLE)) or table,
    )


def _number(value: bytes | None) -> int:
    return int.from_bytes(value or b"", sys.byteorder)


# nftables: by its program, once per router and never per slot.


def apply_rules(text: str) -> None:
    """Put rules in the language of nft into the calling thread's namespace: all of them, or none.

    Raises:
        CommandFailed: nft does not take them; nothing has changed.
        FileNotFoundError: nft is not installed.
    """
    process.run(["nft", "-f", "-"], stdin=text.encode(), timeout_s=_NFT_TIMEOUT_S)


def list_chains() -> str:
    """All chains with their hooks and policies, in the language of nft.

    Raises:
        CommandFailed: nft failed.
        FileNotFoundError: nft is not installed.
    """
    listed = process.run(["nft", "list", "chains"], timeout_s=_NFT_TIMEOUT_S)
    return listed.stdout.decode("utf-8", "replace")
