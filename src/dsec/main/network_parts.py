"""A node's network for sandboxes, as its settings describe it."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path

from dsec.base.errors import InvalidRequest
from dsec.edge.config import EdgeConfig
from dsec.edge.network.networks import NetworkConfig
from dsec.edge.network.router import RouterConfig
from dsec.edge.network.slots import SlotLimits
from dsec.main.settings import Settings


def network_of(settings: Settings, config: EdgeConfig) -> NetworkConfig | None:
    """What an edge is told of it; None = no sandbox has one.

    Raises:
        InvalidRequest: a network of the settings is none.
    """
    if settings.network_slots <= 0:
        return None
    try:
        router = _router(settings, config)
    except ValueError as exc:
        raise InvalidRequest(f"a network of the settings is wrong: {exc}") from exc
    return NetworkConfig(
        router=router,
        state=config.state / "networks",
        program=_programs(settings) / "filter_tc.bpf.o",
        services=config.services,
        limits=SlotLimits(ready=settings.network_slots),
        resolvers=tuple(settings.network_resolvers),
    )


def _router(settings: Settings, config: EdgeConfig) -> RouterConfig:
    pool4, pool6 = settings.network_pool4, settings.network_pool6
    return RouterConfig(
        node=config.node,
        run=config.run,
        pool4=IPv4Network(pool4) if pool4 else None,
        pool6=IPv6Network(pool6) if pool6 else None,
        never=tuple(str(ip_network(each)) for each in settings.network_never),
    )


def _programs(settings: Settings) -> Path:
    if settings.bpf:
        return Path(settings.bpf)
    package = Path(__file__).parents[1]
    packed = package / "bin"
    return packed if packed.exists() else package.parents[1] / "native/target/bpf"
