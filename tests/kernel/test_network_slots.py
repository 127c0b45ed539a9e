"""Slots and their router on the real kernel: what they reach, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from dsec.base.errors import Conflict, Unavailable
from dsec.edge.network.making import SlotMaker, link_name
from dsec.edge.network.router import Router
from dsec.edge.network.routing import Facts, RouterConfig, ensure_router, retire_router
from dsec.edge.network.rules import dropping_forwards
from dsec.edge.network.slots import Slot, SlotLimits, Slots
from dsec.edge.network.warden.settings import TRANSPARENT_PORT
from dsec.linux import mounts, net, process
from dsec.linux.net import Netlink, netlink
from dsec.linux.process import CommandFailed
from tests.kernel import networks
from tests.kernel.networks import PATIENCE_S, WORLD, passing
from tests.pristine import Node, pristine_node, snapshot

pytestmark = pytest.mark.needs_root
REFUSED_S = 0.5
"""Long enough for an answer from the same host, if there were one."""


def some_node() -> str:
    return secrets.token_hex(2)


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="net") as directory:
        yield Path(directory)


@pytest.fixture
def config(home: Path) -> Iterator[RouterConfig]:
    """Of a node of which afterwards nothing may be there."""
    run = home / "run"
    run.mkdir()
    made = RouterConfig(node=some_node(), run=run)
    look = functools.partial(snapshot, Node(os.getpid(), made.node, (run,)))
    try:
        with pristine_node(look):
            yield made
    finally:
        retire_router(made)


def pins_nothing(config: RouterConfig) -> bool:
    return {each.name for each in config.pins.iterdir() if each.is_dir()} == {"node"}


def maker_of(config: RouterConfig) -> Callable[[Facts], SlotMaker]:
    return lambda facts: SlotMaker(config, facts, passing)


def host_has_ipv6() -> bool:
    with netlink() as host:
        return any(str(route.network) == "::/0" for route in host.routes())


def is_gone(slot: Slot) -> bool:
    return not Path(slot.namespace).exists() and not Path(slot.pins).exists()


def reaches(slot: Slot, address: str, port: int) -> bool:
    try:
        networks.connect(Path(slot.namespace), address, port, REFUSED_S).close()
    except OSError:
        return False
    return True


@pytest.fixture
def made(config: RouterConfig) -> Iterator[tuple[Slot, Slot]]:
    """Two slots without limits of their own."""
    maker = SlotMaker(config, ensure_router(config), passing)
    yield maker.make(0), maker.make(1)
    retire_router(config)


def test_a_slot_reaches_the_world_in_the_hosts_name_and_nobody_else(
    config: RouterConfig, made: tuple[Slot, Slot], home: Path
) -> None:
    one, two = made
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(networks.world(home, config.node))
        away = stack.enter_context(networks.listen(world, WORLD))
        here = stack.enter_context(networks.listen(None, "0.0.0.0"))
        other = stack.enter_context(networks.listen(Path(two.namespace), "0.0.0.0"))
        port = away.getsockname()[1]
        with networks.connect(Path(one.namespace), WORLD, port, PATIENCE_S):
            connection, (address, _) = away.accept()
            connection.close()
        assert address == networks.HOST_THERE, "masqueraded"
        assert not reaches(one, networks.HOST_THERE, here.getsockname()[1])
        assert not reaches(one, one.gateway4, here.getsockname()[1])
        assert not reaches(one, two.address4, other.getsockname()[1])
        # That the barriers are what stops it: both listeners do answer those who may.
        with socket.create_connection((networks.HOST_THERE, here.getsockname()[1]), PATIENCE_S):
            pass
        with networks.connect(Path(two.namespace), "127.0.0.1", other.getsockname()[1], PATIENCE_S):
            pass


def test_without_the_hosts_rules_a_slot_reaches_the_host(
    config: RouterConfig, made: tuple[Slot, Slot], home: Path
) -> None:
    """What the rules are for: the same attempt as above succeeds when they are gone."""
    one, _ = made
    with networks.world(home, config.node), networks.listen(None, "0.0.0.0") as here:
        net.apply_rules(f"delete table inet {config.name}\n")
        assert reaches(one, networks.HOST_THERE, here.getsockname()[1])


def test_the_same_by_ipv6(config: RouterConfig, made: tuple[Slot, Slot], home: Path) -> None:
    one, two = made
    if not one.address6:
        assert not host_has_ipv6(), "only a host without IPv6 may have slots without"
        return
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(networks.world(home, config.node))
        away = stack.enter_context(networks.listen(world, networks.WORLD6))
        here = stack.enter_context(networks.listen(None, "::"))
        other = stack.enter_context(networks.listen(Path(two.namespace), "::"))
        port = away.getsockname()[1]
        with networks.connect(Path(one.namespace), networks.WORLD6, port, PATIENCE_S):
            connection, (address, *_) = away.accept()
            connection.close()
        assert address == networks.HOST_THERE6, "masqueraded"
        assert not reaches(one, networks.HOST_THERE6, here.getsockname()[1])
        assert not reaches(one, two.address6, other.getsockname()[1])
        net.apply_rules(f"delete table inet {config.name}\n")
        assert reaches(one, networks.HOST_THERE6, here.getsockname()[1])


@pytest.mark.parametrize(
    ("anywhere", "address"), [("0.0.0.0", "203.0.113.9"), ("::", "2001:db8:99::9")]
)
def test_what_is_marked_goes_to_the_transparent_listener_or_nowhere(
    config: RouterConfig, anywhere: str, address: str
) -> None:
    facts = ensure_router(config)
    slot = SlotMaker(config, facts, networks.inspecting).make(0)
    if facts.pools.six is None and ":" in address:
        assert not host_has_ipv6()
        return
    with pytest.raises(TimeoutError):
        networks.connect(Path(slot.namespace), address, 443, REFUSED_S)
    with net.in_namespace(config.namespace, lambda: transparent_listener(anywhere)) as listener:
        with networks.connect(Path(slot.namespace), address, 443, PATIENCE_S) as client:
            accepted, (source, *_) = listener.accept()
            with accepted:
                assert accepted.getsockname()[:2] == (address, 443)
                assert source in (slot.address4, slot.address6)
                accepted.sendall(b"seen")
                assert client.recv(4) == b"seen"
    retire_router(config)


def transparent_listener(address: str) -> socket.socket:
    six = ":" in address
    listener = socket.socket(socket.AF_INET6 if six else socket.AF_INET)
    level, option = (socket.IPPROTO_IPV6, 75) if six else (socket.SOL_IP, socket.IP_TRANSPARENT)
    listener.setsockopt(level, option, 1)
    listener.bind((address, TRANSPARENT_PORT))
    listener.listen()
    listener.settimeout(PATIENCE_S)
    return listener


def test_nobody_outside_opens_a_connection_into_a_slot(
    config: RouterConfig, made: tuple[Slot, Slot], home: Path
) -> None:
    one, _ = made
    with networks.world(home, config.node) as world:
        with networks.listen(Path(one.namespace), "0.0.0.0") as inside:
            port = inside.getsockname()[1]
            net.in_namespace(world, _route_everything)
            with pytest.raises(TimeoutError):
                networks.connect(world, one.address4, port, REFUSED_S)
            net.apply_rules(f"flush chain inet {config.name} through\n")
            networks.connect(world, one.address4, port, PATIENCE_S).close()


def _route_everything() -> None:
    with netlink() as link:
        device = link.link("eth0")
        assert device is not None
        link.add_route(ip_network("0.0.0.0/0"), device.index, ip_address(networks.HOST_THERE))


def test_inside_a_slot(made: tuple[Slot, Slot]) -> None:
    one, _ = made

    def look() -> dict[str, Any]:
        with netlink() as link:
            device = link.link("eth0")
            assert device is not None
            return {
                "mtu": device.mtu,
                "addresses": {str(each) for each, _ in link.addresses(device.index)},
                "routes": {str(route.network) for route in link.routes()},
                "ports": net.sysctl("ipv4/ip_unprivileged_port_start"),
                "ping": net.sysctl("ipv4/ping_group_range").split(),
                "forwards": net.sysctl("ipv4/ip_forward"),
            }

    seen = net.in_namespace(Path(one.namespace), look)
    with netlink() as host:
        device = next(each for each in host.links() if each.name.startswith("dsec-"))
    six = {one.address6} if one.address6 else set()
    assert seen["mtu"] == device.mtu
    assert seen["addresses"] == {one.address4} | six, "and none of its own making"
    assert seen["routes"] == {"0.0.0.0/0"} | ({"::/0"} if six else set())
    assert (seen["ports"], seen["ping"], seen["forwards"]) == ("0", ["0", "2147483647"], "0")


def test_slots_go_together_and_cost_the_host_no_route(config: RouterConfig) -> None:
    facts = ensure_router(config)
    maker = SlotMaker(config, facts, passing)
    with netlink() as host:
        before = len(host.routes()), len(host.links())
        for number in range(8):
            maker.make(number)
        assert (len(host.routes()), len(host.links())) == before
    assert maker.existing() == maker.whole() == set(range(8))
    assert maker.remove([*range(8), 99]) == []
    assert maker.existing() == set()
    assert pins_nothing(config)
    retire_router(config)


def test_a_router_is_found_again(config: RouterConfig) -> None:
    first = ensure_router(config)
    slot = SlotMaker(config, first, passing).make(7)
    second = ensure_router(config)
    assert second.pools == first.pools
    assert SlotMaker(config, second, passing).whole() == {slot.number}
    retire_router(config)


def test_two_edges_on_one_host_have_their_own(config: RouterConfig, home: Path) -> None:
    (home / "other").mkdir()
    other = RouterConfig(node=some_node(), run=home / "other")
    try:
        one, two = ensure_router(config), ensure_router(other)
        assert not one.pools.four.overlaps(two.pools.four)
        assert one.pools.six is None or one.pools.six != two.pools.six
        assert one.mac != two.mac
        retire_router(config)
        assert ensure_router(other).pools == two.pools
    finally:
        retire_router(other)
        retire_router(config)


def test_two_edges_with_one_name_are_told(config: RouterConfig, home: Path) -> None:
    ensure_router(config)
    (home / "other").mkdir()
    same = RouterConfig(node=config.node, run=home / "other")
    with pytest.raises(Conflict, match="another edge"):
        ensure_router(same)
    with pytest.raises(Conflict):
        retire_router(same)
    retire_router(config)
    retire_router(same)


def test_a_pool_that_the_host_uses_is_told(config: RouterConfig, home: Path) -> None:
    with networks.world(home, config.node):
        taken = RouterConfig(node=config.node, run=config.run, pool4=IPv4Network("198.51.100.0/24"))
        with pytest.raises(Conflict, match=r"198\.51\.100"):
            ensure_router(taken)
    free = RouterConfig(
        node=config.node,
        run=config.run,
        pool4=IPv4Network("198.51.100.0/24"),
        pool6=IPv6Network("fd64:77::/64"),
    )
    assert ensure_router(free).pools.four == free.pool4
    retire_router(config)


def test_a_pool_in_use_stays_whatever_the_host_routes_later(config: RouterConfig) -> None:
    first = ensure_router(config)
    part = list(first.pools.four.subnets(new_prefix=24))[-1]
    with netlink() as host:
        loopback = host.link("lo")
        assert loopback is not None
        host.add_route(part, loopback.index)
        try:
            assert ensure_router(config).pools == first.pools
            retire_router(config)
            assert ensure_router(config).pools != first.pools, "but it is not chosen anew"
        finally:
            remove_route(str(part))
    retire_router(config)


def remove_route(network: str) -> None:
    process.run(["ip", "route", "del", network], timeout_s=PATIENCE_S)


async def test_taken_given_back_and_ended(config: RouterConfig) -> None:
    router = Router(config)
    async with Slots(router, maker_of(config), SlotLimits(ready=2, most=5)).running() as slots:
        one = await slots.take("one")
        await slots.settled()
        assert slots.ready == 2
        await slots.give_back(one)
        await slots.settled()
        assert is_gone(one)
    assert not config.home.exists()


async def test_a_sandbox_keeps_its_network_over_a_restart(config: RouterConfig, home: Path) -> None:
    limits = SlotLimits(ready=2, most=5)
    async with Slots(Router(config), maker_of(config), limits).running() as slots:
        one = await slots.take("one")
    with networks.world(home, config.node) as world, networks.listen(world, WORLD) as away:
        port = away.getsockname()[1]
        with networks.connect(Path(one.namespace), WORLD, port, PATIENCE_S) as open_before:
            connection, _ = away.accept()
            async with Slots(Router(config), maker_of(config), limits).running() as slots:
                assert await slots.adopt({"one": one}) == []
                connection.sendall(b"still")
                assert open_before.recv(5) == b"still"
                assert reaches(one, WORLD, port)
                await slots.give_back(one)
            connection.close()
    assert not config.home.exists()


async def test_a_sandbox_whose_slot_has_gone_is_told(config: RouterConfig) -> None:
    limits = SlotLimits(ready=1, most=5)
    async with Slots(Router(config), maker_of(config), limits).running() as slots:
        one = await slots.take("one")
    net.in_namespace(config.namespace, lambda: remove_link(link_name(one.number)))
    async with Slots(Router(config), maker_of(config), limits).running() as slots:
        assert await slots.adopt({"one": one}) == ["one"]
        await slots.give_back(one)


def remove_link(name: str) -> None:
    with netlink() as link:
        found = link.link(name)
        assert found is not None
        link.remove_link(found.index)


def test_rules_of_others_that_would_drop_are_found(home: Path) -> None:
    """As Docker's: told with their cure, since no rule of ours overrules them."""
    place = home / "docker"
    chain = "chain FORWARD {\ntype filter hook forward priority 0; policy drop;\n}"
    drops = f"table ip filter {{\n{chain}\n}}"

    def look() -> list[str]:
        before = dropping_forwards(net.list_chains())
        net.apply_rules(f"{drops}\n")
        return before + dropping_forwards(net.list_chains())

    assert net.in_new_namespace(place, look) == ["ip filter FORWARD"]
    net.remove_namespace(place)


def test_rules_that_are_wrong_change_nothing(config: RouterConfig) -> None:
    with pytest.raises(CommandFailed):
        net.apply_rules(f"table inet {config.name} {{ }}\nno such thing\n")


def test_an_error_says_what_was_tried() -> None:
    def both(host: Netlink) -> None:
        with host.together():
            host.set_up(999999)
            host.set_up(999998)

    with netlink() as host, pytest.raises(OSError, match="set link 999999 up") as failed:
        both(host)
    assert failed.value.errno == errno.ENODEV


# Every call that changes something, failing or the last one.


class Nth:
    """Does something before the nth change of the kernel."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.count = 0
        self._number = number
        self._act = act

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for owner, names in CHANGES.items():
            for name in names:
                patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self._number:
                self._act()
            return call(*args, **kwargs)

        return counted


CHANGES: dict[Any, list[str]] = {
    Netlink: [
        name
        for name, _ in inspect.getmembers(Netlink, inspect.isfunction)
        if name.startswith(("add_", "set_", "remove_", "attach_"))
    ],
    net: ["apply_rules"],
    mounts: ["mount", "umount"],
}


def _fail() -> None:
    raise OSError(12, "not now")


def make_all(config: RouterConfig) -> SlotMaker:
    maker = SlotMaker(config, ensure_router(config), passing)
    maker.make(0)
    return maker


@pytest.mark.slow
def test_whatever_fails_what_was_made_can_be_removed(config: RouterConfig) -> None:
    number = 0
    while True:
        number += 1
        nth = Nth(number, _fail)
        with pytest.MonkeyPatch.context() as patch:
            nth.watch(patch)
            with contextlib.suppress(OSError, Unavailable):
                make_all(config)
        retire_router(config)
        assert not config.home.exists(), f"change {number}"
        if nth.count < number:
            break
    assert number > 20


@pytest.mark.slow
def test_killed_before_any_change_the_next_edge_has_it_whole(config: RouterConfig) -> None:
    number = 0
    while True:
        number += 1
        status = in_a_process_killed_at(number, lambda: make_all(config))
        maker = SlotMaker(config, ensure_router(config), passing)
        maker.remove(sorted(maker.existing()))
        assert maker.existing() == set()
        assert pins_nothing(config)
        assert maker.make(0).number in maker.whole(), f"change {number}"
        assert maker.remove([0]) == []
        if number % 2:
            retire_router(config)  # so that every other starts with a router, the others with none
        if status == 0:
            break
    assert number > 20
    retire_router(config)


@pytest.mark.slow
def test_killed_while_it_is_taken_away_the_rest_goes_next_time(config: RouterConfig) -> None:
    number = 0
    status = 1
    while status != 0:
        number += 1
        make_all(config)
        status = in_a_process_killed_at(number, lambda: retire_router(config))
        retire_router(config)
        assert not config.home.exists(), f"change {number}"
        assert not (Path("/sys/class/net") / config.name).exists()
    assert number > 4


def in_a_process_killed_at(number: int, work: Callable[[], object]) -> int:
    """Fork, and have the child kill itself before its nth change; 0 = it came to the end."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                Nth(number, lambda: os.kill(os.getpid(), signal.SIGKILL)).watch(patch)
                work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status
