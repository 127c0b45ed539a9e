"""What nft is told, on both sides of the uplink, and what its answers mean. Pure.

slots  s<N> |  router's namespace  | up0 === dsec-<node> |  host's namespace  | the world
`router_rules`                               `host_rules`
"""

from __future__ import annotations

import re

from dsec.edge.network.pools import Pools
from dsec.edge.network.warden.settings import DNS_PORT, PROXY_PORT, TRANSPARENT_PORT
from dsec.linux.network_filter import INSPECT_MARK

UPLINK = "up0"
"""The router's end."""
ROUTER_TABLE = "dsec"
_TABLE = re.compile(r"^table (\S+ \S+) \{$")
_CHAIN = re.compile(r"^\s+chain (\S+) \{$")
_FORWARD_DROPS = re.compile(r"hook forward .*policy drop")


def host_rules(table: str, uplink: str, pools: Pools) -> str:
    """Rules of the host's namespace, all replaced at once.

    From the uplink nothing reaches the host itself, before any rule of others redirects it (ports
    that a container engine has published are addresses of the host too); nor does anything claim an
    address that is not the pools'. Into the pools only answers go.
    """
    sources = [f"{_family(n)} saddr != {n} drop" for n in pools.networks]
    others = [] if pools.six is not None else ["meta nfproto ipv6 drop"]
    masks = [f'{_family(n)} saddr {n} oifname != "{uplink}" masquerade' for n in pools.networks]
    return _table(
        table,
        {
            "arriving": [
                "type filter hook prerouting priority raw; policy accept;",
                f'iifname != "{uplink}" accept',
                *sources,
                *others,
                "fib daddr type { local, broadcast, anycast, multicast } drop",
            ],
            "to_host": [
                "type filter hook input priority filter - 10; policy accept;",
                f'iifname "{uplink}" drop',
            ],
            "through": [
                "type filter hook forward priority filter - 10; policy accept;",
                f'oifname "{uplink}" ct state established,related accept',
                f'oifname "{uplink}" drop',
            ],
            "leaving": ["type nat hook postrouting priority srcnat; policy accept;", *masks],
        },
    )


def router_rules(pools: Pools) -> str:
    """Rules of the router's namespace: a second barrier behind the slots' filters, and inspection.

    Nothing here tracks connections. What a filter has marked goes to the warden's transparent
    listener; while there is none it is dropped, so that its sender tries again until there is.
    """
    inspected = f"meta mark {INSPECT_MARK:#x}"
    hand_over = [
        f"{inspected} meta nfproto {_protocol(gateway.version)} meta l4proto tcp "
        f"tproxy {_ip(gateway.version)} to {_bracketed(str(gateway))}:{TRANSPARENT_PORT} accept"
        for gateway in pools.gateways
    ]
    answering = [
        f'iifname "s*" {_ip(gateway.version)} daddr {gateway} {protocol} dport {ports} accept'
        for gateway in pools.gateways
        for protocol, ports in (("udp", f"{DNS_PORT}"), ("tcp", f"{{ {DNS_PORT}, {PROXY_PORT} }}"))
    ]
    return _table(
        ROUTER_TABLE,
        {
            "arriving": [
                "type filter hook prerouting priority mangle; policy accept;",
                *hand_over,
                f"{inspected} drop",
            ],
            "to_router": [
                "type filter hook input priority filter; policy drop;",
                'iifname "lo" accept',
                f"{inspected} accept",
                *answering,
            ],
            "through": [
                "type filter hook forward priority filter; policy drop;",
                f'iifname "s*" oifname "{UPLINK}" accept',
                f'iifname "{UPLINK}" oifname "s*" accept',
            ],
        },
    )


def no_rules(table: str) -> str:
    """Take a table away, whether there is one or not."""
    return f"table inet {table}\ndelete table inet {table}\n"


def _table(name: str, chains: dict[str, list[str]]) -> str:
    body = "".join(
        f"\tchain {chain} {{\n" + "".join(f"\t\t{line}\n" for line in lines) + "\t}\n"
        for chain, lines in chains.items()
    )
    return f"{no_rules(name)}table inet {name} {{\n{body}}}\n"


def _family(network: object) -> str:
    return "ip6" if ":" in str(network) else "ip"


def _ip(version: int) -> str:
    return "ip" if version == 4 else "ip6"


def _protocol(version: int) -> str:
    return f"ipv{version}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def dropping_forwards(chains: str) -> list[str]:
    """Chains, as `nft list chains` shows them, that drop what nobody lets through (Docker's do).

    No rule of ours can overrule them: a packet must be accepted in every chain.
    """
    table = chain = ""
    found = []
    for line in chains.splitlines():
        if match := _TABLE.match(line):
            table = match[1]
        elif match := _CHAIN.match(line):
            chain = match[1]
        elif _FORWARD_DROPS.search(line):
            found.append(f"{table} {chain}")
    return found


def advice_on(chain: str, uplink: str) -> str:
    """What to do about a chain that drops."""
    family, _, name = chain.partition(" ")
    program = "ip6tables" if family == "ip6" else "iptables"
    where = "DOCKER-USER (or FORWARD, without Docker)"
    return (
        f"chain {name} of {family} drops what is forwarded: sandboxes reach nothing until it lets "
        f"them. `{program} -I CHAIN -i {uplink} -j ACCEPT` and `{program} -I CHAIN -o {uplink} "
        f"-j ACCEPT`, with {where} for CHAIN"
    )
