"""Making the router and taking it away, step by step. Blocks; see `router` for what it is."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_interface, ip_network
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from dsec.base.errors import Conflict, Unavailable, Unsupported
from dsec.edge.network.never import never
from dsec.edge.network.pools import (
    Network,
    Pools,
    candidates4,
    candidates6,
    mac_of,
    overlapping,
)
from dsec.edge.network.rules import (
    UPLINK,
    advice_on,
    dropping_forwards,
    host_rules,
    no_rules,
    router_rules,
)
from dsec.linux import mounts, net
from dsec.linux.mounts import MountFlag
from dsec.linux.net import Netlink, Route, VethEnd, netlink
from dsec.linux.network_filter import INSPECT_MARK
from dsec.linux.process import CommandFailed

N = TypeVar("N", IPv4Network, IPv6Network)

INSPECT_TABLE = INSPECT_MARK
"""Of routes: marked packets are delivered here."""
UPLINK_INDEX = 2
"""In the router's namespace; slots' devices have chosen indexes too, and must find theirs free."""
DEFAULT_MTU = 1500
_DEVICES = Path("/sys/class/net")
ROUTER_SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    "ipv6/conf/all/forwarding": "1",
    "ipv6/conf/default/accept_dad": "0",
    "ipv6/conf/default/accept_ra": "0",
    "ipv6/conf/default/addr_gen_mode": "1",
}
"""Before its first device is made, which takes the defaults: no addresses but those it is given."""


class RouterConfig(Struct, frozen=True, kw_only=True):
    """What an operator says of a node's network."""

    node: str
    run: Path
    pool4: IPv4Network | None = None
    """None = a free part of `pools.DEFAULT4`."""
    pool6: IPv6Network | None = None
    """None = an own one of unique local addresses."""
    never: tuple[str, ...] = ()
    """Networks no sandbox reaches, beside those that none reaches anywhere: the control plane's."""

    @property
    def home(self) -> Path:
        """Where all of it is."""
        return self.run / "net"

    @property
    def namespace(self) -> Path:
        """Of the router."""
        return self.home / "router"

    @property
    def slots(self) -> Path:
        """Directory of the slots' namespaces."""
        return self.home / "slots"

    @property
    def pins(self) -> Path:
        """A file system for eBPF."""
        return self.home / "bpf"

    @property
    def name(self) -> str:
        """Of the uplink's end in the host, and of the table of rules there."""
        return f"dsec-{self.node}"

    def mac(self, end: str) -> str:
        """Hardware address of something of this edge's; no other edge has the same."""
        return mac_of(f"{self.node} {self.home} {end}")


class Facts(Struct, frozen=True, kw_only=True):
    """What the router turned out to be."""

    pools: Pools
    mtu: int
    mac: str
    """Of the router's end of every slot's pair."""
    never: tuple[Network, ...]
    notes: tuple[str, ...] = ()
    """What the operator should know, in sentences."""


def ensure_router(config: RouterConfig) -> Facts:
    """Have the router there, whole: every step looks first at what there is.

    Raises:
        Conflict: another edge has this node's name, or the host uses the pool otherwise.
        Unsupported: the host cannot do it; the message says what is missing.
        Unavailable: the kernel refused a step; it may be tried again.
    """
    try:
        return _ensure(config)
    except CommandFailed as exc:
        raise Unsupported(f"this host does not take the rules of a network: {exc}") from exc
    except PermissionError as exc:
        raise Unsupported(f"this edge may not make networks: {exc}") from exc
    except OSError as exc:
        if exc.filename == "nft":
            raise Unsupported("sandboxes with a network need nftables on the node") from exc
        raise Unavailable(f"the network of sandboxes could not be made: {exc}") from exc


def _ensure(config: RouterConfig) -> Facts:
    for directory in (config.home, config.slots):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _ensure_bpffs(config.pins)
    with netlink() as host:
        routes = host.routes()
        mtu = _mtu(host, routes)
        six = _has_ipv6(routes)
        _ensure_namespace(config)
        uplink = _ensure_uplink(config, host, mtu)
        pools = _ensure_pools(config, host, uplink, six=six)
        net.apply_rules(host_rules(config.name, config.name, pools))
        net.in_namespace(config.namespace, lambda: _furnish(config, pools))
        notes = (*_forward(pools, host), *_obstacles(config), *_kept_apart(config, pools))
        addresses = [ip_network(address) for address, _ in host.addresses()]
    return Facts(
        pools=pools,
        mtu=mtu,
        mac=config.mac("router"),
        never=never(pools.networks, addresses, map(ip_network, config.never)),
        notes=notes,
    )


def _ensure_bpffs(place: Path) -> None:
    place.mkdir(mode=0o700, exist_ok=True)
    if mounts.mount_at(place.resolve()) is None:
        flags = MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC
        mounts.mount("bpf", place, "bpf", flags, "mode=0700")
    (place / "node").mkdir(mode=0o700, exist_ok=True)


def _mtu(host: Netlink, routes: Sequence[Route]) -> int:
    """Of the way out: what is longer would not arrive, and not every network says so."""
    links = {link.index: link.mtu for link in host.links()}
    ways = [route for route in routes if route.network.prefixlen == 0]
    found = [route.mtu or links.get(route.device, 0) for route in ways]
    return min((mtu for mtu in found if mtu), default=DEFAULT_MTU)


def _has_ipv6(routes: Sequence[Route]) -> bool:
    enabled = (
        net.has_sysctl("ipv6/conf/all/disable_ipv6")
        and net.sysctl("ipv6/conf/all/disable_ipv6") == "0"
    )
    return enabled and any(r.network.version == 6 and r.network.prefixlen == 0 for r in routes)


def _ensure_namespace(config: RouterConfig) -> None:
    if not net.is_namespace(config.namespace):
        config.namespace.unlink(missing_ok=True)
        net.in_new_namespace(config.namespace, lambda: None)
    net.in_namespace(config.namespace, _set_router)


def _set_router() -> None:
    for name, value in ROUTER_SETTINGS.items():
        if net.has_sysctl(name):
            net.set_sysctl(name, value)


def _ensure_uplink(config: RouterConfig, host: Netlink, mtu: int) -> int:
    """Both ends, up; the index of the host's. Whose it is its hardware address says."""
    found = host.link(config.name)
    if found is not None and found.mac != config.mac("host"):
        raise Conflict(
            f"the device {config.name} on this host is not this edge's: another edge has the node "
            f"id {config.node!r}, or had it with another run directory than {config.run}"
        )
    peer = net.in_namespace(config.namespace, _router_end)
    if found is not None and (peer == 0 or peer != found.index):
        host.remove_link(found.index)  # its namespace has gone from its place
        found = None
    if found is None:
        net.in_namespace(config.namespace, _remove_router_end)
        here = VethEnd(config.name, config.mac("host"), mtu)
        there = VethEnd(UPLINK, config.mac("uplink"), mtu, UPLINK_INDEX)
        host.add_veth(here, there, config.namespace)
    _quiet(config.name)
    index = _index(host, config.name)
    host.set_up(index, arp=False)
    return index


def _router_end() -> int:
    with netlink() as router:
        found = router.link(UPLINK)
    return found.peer if found else 0


def _remove_router_end() -> None:
    with netlink() as router:
        if found := router.link(UPLINK):
            router.remove_link(found.index)


def _quiet(device: str) -> None:
    """No address of its own making, none by advertisement."""
    for name, value in (("addr_gen_mode", "1"), ("accept_ra", "0"), ("accept_dad", "0")):
        if net.has_sysctl(f"ipv6/conf/{device}/{name}"):
            net.set_sysctl(f"ipv6/conf/{device}/{name}", value)


def _ensure_pools(config: RouterConfig, host: Netlink, uplink: int, *, six: bool) -> Pools:
    """Those the router has, or free ones; the host's route to each is what claims it."""
    has = net.in_namespace(config.namespace, _router_pools)
    four = [each for each in has if isinstance(each, IPv4Network)]
    sixes = [each for each in has if isinstance(each, IPv6Network)]
    pool4 = _claim(config, host, uplink, four or list(candidates4(config.pool4)))
    pool6 = None
    if sixes or six:
        own = sixes or list(candidates6(config.pool6, f"{config.node} {config.home}"))
        pool6 = _claim(config, host, uplink, own)
    return Pools(four=pool4, six=pool6)


def _router_pools() -> list[Network]:
    with netlink() as router:
        loopback = router.link("lo")
        found = router.addresses(loopback.index if loopback else None)
    return [ip_interface((a, length)).network for a, length in found if not a.is_loopback]


def _claim(config: RouterConfig, host: Netlink, uplink: int, pools: Sequence[N]) -> N:
    """The first pool that nobody on this host uses, claimed by the route to it."""
    routes = host.routes()
    ours = [route.network for route in routes if route.device == uplink]
    others = [route.network for route in routes if route.device != uplink]
    others += [ip_interface((a, length)).network for a, length in host.addresses()]
    used: Network | None = None
    for pool in sorted(pools, key=lambda each: each not in ours):
        if pool not in ours and (used := overlapping(pool, others)):
            continue  # one that is ours stays so, whatever came over it since
        host.add_neighbour(uplink, pool[1], config.mac("uplink"))
        try:
            host.add_route(pool, uplink, pool[1], claim=pool not in ours)
        except FileExistsError:  # another edge was quicker
            used = pool
            continue
        return pool
    raise Conflict(
        f"this host uses {used} itself, so sandboxes cannot have {pools[0]}"
        + (f" to {pools[-1]}" if len(pools) > 1 else "")
        + ": configure another pool for the network of sandboxes"
    )


def _furnish(config: RouterConfig, pools: Pools) -> None:
    """In the router's namespace: addresses, ways, rules."""
    with netlink() as router:
        loopback, uplink = _index(router, "lo"), _index(router, UPLINK)
        router.set_up(loopback)
        router.set_up(uplink, arp=False)
        for pool in pools.networks:
            router.add_address(loopback, pool[1], pool.prefixlen)
            router.add_neighbour(uplink, pool[2], config.mac("host"))
            router.add_route(net.everywhere(pool.version), uplink, pool[2])
            router.add_unreachable(pool)
            router.add_local_delivery(pool.version, INSPECT_MARK, INSPECT_TABLE)
    net.apply_rules(router_rules(pools))


def _index(link: Netlink, name: str) -> int:
    found = link.link(name)
    if found is None:
        raise FileNotFoundError(errno.ENODEV, "no such device", name)
    return found.index


def _forward(pools: Pools, host: Netlink) -> list[str]:
    """Have the host forward, without losing what advertisements told it; what had to be changed."""
    notes = []
    if net.sysctl("ipv4/ip_forward") != "1":
        net.set_sysctl("ipv4/ip_forward", "1")
        notes.append("net.ipv4.ip_forward was off and is on now: this host forwards packets")
    if pools.six is None:
        notes.append("this host has no way to the IPv6 internet: sandboxes have IPv4 alone")
    elif net.sysctl("ipv6/conf/all/forwarding") != "1":
        # A host that forwards heeds no advertisements, unless told to (2).
        for name in ("all", "default", *(link.name for link in host.links())):
            setting = f"ipv6/conf/{name}/accept_ra"
            if net.has_sysctl(setting) and net.sysctl(setting) == "1":
                net.set_sysctl(setting, "2")
        net.set_sysctl("ipv6/conf/all/forwarding", "1")
        notes.append("net.ipv6.conf.all.forwarding was off and is on now (accept_ra 1 became 2)")
    return notes


def _obstacles(config: RouterConfig) -> list[str]:
    try:
        chains = net.list_chains()
    except CommandFailed as exc:  # rules of others that this nft cannot read
        return [f"whether other rules of this host drop what is forwarded is not known: {exc}"]
    return [advice_on(chain, config.name) for chain in dropping_forwards(chains)]


def _kept_apart(config: RouterConfig, pools: Pools) -> list[str]:
    wanted = {config.pool4: pools.four, config.pool6: pools.six}
    return [
        f"{has} stays the pool until no sandbox with a network is left; then it will be {pool}"
        for pool, has in wanted.items()
        if pool is not None and has is not None and pool != has
    ]


def _has_router(config: RouterConfig) -> bool:
    """Whether there is anything of it. Costs a look or two at the file system."""
    uplink = _DEVICES / config.name / "address"
    return config.home.exists() or (
        uplink.exists() and uplink.read_text().strip() == config.mac("host")
    )


def retire_router(config: RouterConfig) -> None:
    """Remove all there is, from the outside in; nothing there is no error.

    Raises:
        Conflict: the uplink is another edge's.
        OSError: something resists.
    """
    if not _has_router(config):
        return
    with netlink() as host:
        uplink = host.link(config.name)
        if uplink is not None and uplink.mac != config.mac("host"):
            raise Conflict(f"the device {config.name} is another edge's")
        if uplink is not None:
            host.remove_link(uplink.index)
    with contextlib.suppress(FileNotFoundError):  # without nft there are no rules either
        net.apply_rules(no_rules(config.name))
    if not config.home.exists():
        return
    for each in (*config.slots.glob("*"), config.namespace):
        net.remove_namespace(each)
    while mounts.is_mounted(config.pins.resolve()):
        mounts.umount(config.pins, detach=True)
    shutil.rmtree(config.home)
