"""What the warden is told once, and all its bounds."""

from __future__ import annotations

from msgspec import Struct

TRANSPARENT_PORT = 15001
"""Where the router's rules send inspected connections."""
PROXY_PORT = 3128
"""Of the explicit proxy, on the gateway."""
DNS_PORT = 53


class Limits(Struct, frozen=True, kw_only=True):
    """All bounds. Those `per sandbox` keep one from taking what is there for all."""

    questions_per_s: float = 50.0
    """Per sandbox, sustained."""
    questions_burst: float = 200.0
    questions_at_once: int = 32
    """Per sandbox, waiting for the node's resolvers."""
    wildcard_names_per_minute: int = 60
    """Per sandbox and wildcard: names not asked for in the last minute."""
    wildcard_label_chars: int = 40
    """Longest label of a name that only a wildcard allows."""
    wildcard_name_bits: float = 128.0
    """Most information (entropy times length) in what such a name has below its wildcard."""
    ttl_min_s: float = 30.0
    ttl_max_s: float = 3600.0
    given_names: int = 512
    """Per sandbox: names whose addresses are remembered."""
    cache_entries: int = 8192
    upstream_at_once: int = 256
    upstream_attempt_s: float = 2.0
    upstream_attempts: int = 3
    all_questions_at_once: int = 2048
    dns_connections: int = 8
    """Per sandbox, of DNS over TCP."""
    all_dns_connections: int = 1024
    dns_idle_s: float = 10.0
    connections: int = 256
    """Per sandbox, through the proxy."""
    all_connections: int = 6000
    head_s: float = 10.0
    """For the first bytes of a connection, or the head of a request once it has begun."""
    head_bytes: int = 64 * 1024
    connect_s: float = 10.0
    idle_s: float = 900.0
    """Without a byte in either direction."""
    keep_alive_s: float = 120.0
    """Between two requests of one connection."""
    denials_kinds: int = 16
    """Per sandbox and telling; more are counted together by their reason."""
    denials_every_s: float = 1.0


class Settings(Struct, frozen=True, kw_only=True):
    """Where to listen and whom to ask."""

    gateway4: str
    gateway6: str = ""
    """Empty: no IPv6."""
    router: str = ""
    """Path of the network namespace to listen in; empty = its own."""
    dns_port: int = DNS_PORT
    transparent_port: int = TRANSPARENT_PORT
    """0, as for the others, lets the kernel choose: for tests."""
    proxy_port: int = PROXY_PORT
    resolvers: tuple[str, ...] = ()
    """`address` or `address#port`; empty = those of `resolv_conf`, read again when it changes."""
    resolv_conf: str = "/etc/resolv.conf"
    never: tuple[str, ...] = ()
    """Networks nobody reaches: the node's own addresses, the pools. Those no host should route
    (loopback, link-local, multicast ...) are added."""
    local_names: tuple[str, ...] = ()
    """Hosts of the operator's own services, which may have private addresses."""
    authorities: str = ""
    """File with certificates to trust besides the host's, for upgraded connections."""
    limits: Limits = Limits()
