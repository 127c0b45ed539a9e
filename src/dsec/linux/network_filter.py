"""The eBPF filter of one slot (`bpf/filter_tc.bpf.c`): loading, attaching, maps.

Loaded with libbpf by ctypes; its maps are pinned, so that they outlive this process, and no descriptor
is held for an idle sandbox.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

IPPROTO = {"tcp": 6, "udp": 17, "icmp": 1}
MAX_SPANS = 16
"""Of one address; more cannot be told to the kernel."""
INSPECT_MARK = 0xD5EC
"""On packets whose connection the warden looks into first."""

Reason = Literal["rule", "never", "spoofed", "fragment", "malformed", "protocol", "expired"]


class PortSpan(Struct, frozen=True):
    """Ports of one protocol number; `inspect` sends TCP through the warden."""

    protocol: int
    low: int
    high: int
    inspect: bool = False


class SlotSettings(Struct, frozen=True, kw_only=True):
    """What the filter of a slot is told once. Addresses are packed: 4 and 16 bytes."""

    slot: int
    address4: bytes
    address6: bytes
    gateway4: bytes
    """Where the resolver listens; only DNS and what was inspected go there."""
    gateway6: bytes
    proxy_port: int
    """The warden's explicit proxy on the gateway; 0 = none."""


class Counters(Struct, frozen=True, kw_only=True):
    """Since the slot was made."""

    sent_packets: int = 0
    sent_bytes: int = 0
    received_packets: int = 0
    received_bytes: int = 0
    denied_packets: int = 0


class Denial(Struct, frozen=True, kw_only=True):
    """A packet that was not let through; of a flood only some are told, and all counted."""

    slot: int
    reason: Reason
    inbound: bool
    protocol: int
    address: bytes
    """Packed, of the other side."""
    port: int
