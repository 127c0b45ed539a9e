"""Making slots and removing them. Blocks; see `slots` for when.

Nothing is undone here step by step: what was made in part is removed like what was whole, since
`remove` looks at each thing a slot consists of. So a failure half-way, a crash, and a sandbox's end
all leave by one door.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ipaddress import ip_network
from pathlib import Path
from typing import Protocol

from dsec.edge.network.pools import Address
from dsec.edge.network.routing import Facts, RouterConfig
from dsec.edge.network.slots import Slot
from dsec.edge.network.warden.settings import PROXY_PORT
from dsec.linux import net
from dsec.linux.net import VethEnd, netlink
from dsec.linux.network_filter import Programs, SlotSettings

DEVICE = "eth0"
LOOPBACK_INDEX, DEVICE_INDEX = 1, 2
"""In the slot's namespace."""
FIRST_LINK_INDEX = 16
"""In the router's namespace, of slot 0: indexes are chosen here, so nothing need be looked up."""
DOOMED = 0xD5EC
"""Group of devices that are removed together, which takes as long as one alone (20 ms)."""
SLOT_SETTINGS = {
    "ipv4/ip_unprivileged_port_start": "0",
    "ipv4/ping_group_range": "0 2147483647",
    "ipv4/ip_forward": "0",
    "ipv6/conf/all/forwarding": "0",
    "ipv6/conf/all/accept_ra": "0",
    "ipv6/conf/default/accept_ra": "0",
    "ipv6/conf/default/accept_dad": "0",
    "ipv6/conf/default/addr_gen_mode": "1",
}
"""Before the device is made, which takes the defaults. Root inside is not root here: it may listen on
any port, and ping without a raw socket, and change none of this."""
_LINK = re.compile(r"s([0-9]{1,8})")


class Load(Protocol):
    """Loads a slot's filter: its maps pinned in one directory, shared ones in another."""

    def __call__(
        self, settings: SlotSettings, pins: Path, shared: Path
    ) -> AbstractContextManager[Programs]:
        """Programs to attach inside; once attached, they live without their descriptors.

        Raises:
            OSError: the kernel does not take them.
        """
        ...


class SlotMaker:
    """Makes slots of one router."""

    def __init__(self, config: RouterConfig, facts: Facts, load: Load) -> None:
        self._config = config
        self._facts = facts
        self._load = load

    def make(self, number: int) -> Slot:
        """Make a slot. If that fails, what there is of it must be removed.

        Raises:
            OSError: the kernel refused a step.
        """
        slot = self._describe(number)
        net.in_new_namespace(Path(slot.namespace), lambda: self._furnish(number))
        pins = Path(slot.pins)
        pins.mkdir(mode=0o700)
        with self._load(self._settings(number), pins, self._config.pins / "node") as programs:
            self._in_router(lambda: self._join(number, programs))
        return slot

    def remove(self, numbers: Sequence[int]) -> list[int]:
        """Remove slots, whatever there is of them; those that resist."""
        if net.is_namespace(self._config.namespace):
            self._in_router(lambda: _remove_links(numbers))
        return [number for number in numbers if not self._remove_rest(number)]

    def existing(self) -> set[int]:
        """Slots of which there is anything."""
        return self._named(self._config.slots) | self._named(self._config.pins) | self._linked()

    def whole(self) -> set[int]:
        """Slots that can be used."""
        placed = {n for n in self._named(self._config.slots) if net.is_namespace(self._place(n))}
        return placed & self._named(self._config.pins) & self._linked()

    def _describe(self, number: int) -> Slot:
        four, six = _texts(self._facts.pools.of(number))
        gateway4, gateway6 = _texts(self._facts.pools.gateways)
        return Slot(
            number=number,
            namespace=str(self._place(number)),
            address4=four,
            address6=six,
            gateway4=gateway4,
            gateway6=gateway6,
            pins=str(self._config.pins / str(number)),
        )

    def _settings(self, number: int) -> SlotSettings:
        four, six = _packed(self._facts.pools.of(number))
        gateway4, gateway6 = _packed(self._facts.pools.gateways)
        return SlotSettings(
            slot=number,
            address4=four,
            address6=six,
            gateway4=gateway4,
            gateway6=gateway6,
            proxy_port=PROXY_PORT,
        )

    def _furnish(self, number: int) -> None:
        """In the slot's new namespace: its device, addresses, the one way out."""
        for name, value in SLOT_SETTINGS.items():
            if net.has_sysctl(name):
                net.set_sysctl(name, value)
        pools = self._facts.pools
        with netlink() as slot:
            here = VethEnd(DEVICE, self._mac(number), self._facts.mtu, DEVICE_INDEX)
            there = VethEnd(
                link_name(number), self._facts.mac, self._facts.mtu, FIRST_LINK_INDEX + number
            )
            slot.add_veth(here, there, self._config.namespace)
            with slot.together():
                slot.set_up(LOOPBACK_INDEX)
                slot.set_up(DEVICE_INDEX, arp=False)
                for address, gateway in zip(pools.of(number), pools.gateways, strict=True):
                    slot.add_address(DEVICE_INDEX, address, address.max_prefixlen)
                    slot.add_neighbour(DEVICE_INDEX, gateway, self._facts.mac)
                    slot.add_route(net.everywhere(address.version), DEVICE_INDEX, gateway)

    def _join(self, number: int, programs: Programs) -> None:
        """In the router's namespace: the filter first, and only then a way to the slot."""
        index = FIRST_LINK_INDEX + number
        with netlink() as router:
            with router.together():
                router.add_hooks(index)
                router.attach_filter(index, "ingress", programs.from_sandbox, "from_sandbox")
                router.attach_filter(index, "egress", programs.to_sandbox, "to_sandbox")
            with router.together():
                router.set_up(index, arp=False)
                for address in self._facts.pools.of(number):
                    router.add_neighbour(index, address, self._mac(number))
                    router.add_route(ip_network(address), index)

    def _remove_rest(self, number: int) -> bool:
        """What is left of a slot without its device; whether that went."""
        pins = self._config.pins / str(number)
        try:
            net.remove_namespace(self._place(number))
            if pins.exists():
                shutil.rmtree(pins)
        except OSError:
            return False
        return True

    def _in_router(self, work: Callable[[], None]) -> None:
        net.in_namespace(self._config.namespace, work)

    def _mac(self, number: int) -> str:
        return self._config.mac(f"slot {number}")

    def _place(self, number: int) -> Path:
        return self._config.slots / str(number)

    def _named(self, directory: Path) -> set[int]:
        if not directory.exists():
            return set()
        return {int(each.name) for each in directory.iterdir() if each.name.isdecimal()}

    def _linked(self) -> set[int]:
        if not net.is_namespace(self._config.namespace):
            return set()
        return net.in_namespace(self._config.namespace, _numbers_of_links)


def link_name(number: int) -> str:
    """Of the router's end of a slot's pair."""
    return f"s{number}"


def _remove_links(numbers: Sequence[int]) -> None:
    wanted = set(map(link_name, numbers))
    with netlink() as router:
        if indexes := [link.index for link in router.links() if link.name in wanted]:
            router.remove_links(indexes, DOOMED)


def _numbers_of_links() -> set[int]:
    with netlink() as router:
        matches = [_LINK.fullmatch(link.name) for link in router.links()]
    return {int(match[1]) for match in matches if match}


def _texts(addresses: Sequence[Address]) -> tuple[str, str]:
    """IPv4 and IPv6; the latter empty if there is none."""
    four, *six = map(str, addresses)
    return four, six[0] if six else ""


def _packed(addresses: Sequence[Address]) -> tuple[bytes, bytes]:
    """IPv4 and IPv6; the latter all zero, which nobody can send from, if there is none."""
    four, *six = (address.packed for address in addresses)
    return four, six[0] if six else bytes(16)
