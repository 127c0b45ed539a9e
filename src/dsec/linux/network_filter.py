"""The eBPF filter of one slot (`bpf/filter_tc.bpf.c`): loading it, telling it its policy, hearing it.

Its maps are pinned, so that they outlive this process, and no descriptor is held for an idle sandbox:

    <pins>/active, networks, names, counters      of the slot
    <shared>/never, denials                       of all slots of a node

From the moment it is loaded until it is told a policy it denies everything. Blocks, but briefly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

from msgspec import Struct

from dsec.linux import bpf
from dsec.linux.bpf import BpfObject, Map, Ring, Shape

IPPROTO = {"tcp": 6, "udp": 17, "icmp": 1}
MAX_SPANS = 16
"""Of one address; more cannot be told to the kernel."""
INSPECT_MARK = 0xD5EC
"""On packets whose connection the warden looks into first."""

OBJECT = "filter_tc.bpf.o"
"""Name of the object file."""
MAX_NETWORKS = 20000
"""Rules of a slot's policy and of the one before it."""
MAX_NAMES = 1024
"""Addresses that a slot may hold for names."""
MAX_NEVER = 1024
"""Networks that no slot reaches."""

Reason = Literal["rule", "never", "spoofed", "fragment", "malformed", "protocol", "expired"]
Network = IPv4Network | IPv6Network
Directory = Path | str
"""Of pins."""


class PortSpan(Struct, frozen=True):
    """Ports of one protocol number; `inspect` sends TCP through the warden. 1 is ICMPv6 too."""

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


class Programs(NamedTuple):
    """Descriptors of a slot's classifiers."""

    from_sandbox: int
    to_sandbox: int


class Name(Struct, frozen=True, kw_only=True):
    """What an address may be used for that a name gave."""

    spans: tuple[PortSpan, ...]
    left_s: float
    """Until no new connection may be made; negative when that is over."""


# As in bpf/filter_tc.h.

_REASONS: tuple[Reason, ...] = get_args(Reason)
"""The first one is 1."""
_INSPECT = 1
_U32 = struct.Struct("=I")
_SETTINGS = struct.Struct("=16s16s16s16sIHH")
_PREFIX = struct.Struct("=I16s")
_PLACE = struct.Struct("=I16s")
_PLACES = struct.Struct("=II16s")
_SPAN = struct.Struct("=BBHH")
_SPANS = struct.Struct(f"=I{MAX_SPANS * _SPAN.size}s")
_NAME = struct.Struct(f"=Q{_SPANS.size}s4x")
_COUNTERS = struct.Struct("=5Q")
_DENIAL = struct.Struct("=16sIHBBB3x")
_DENIALS_BYTES = 256 * 1024

_ACTIVE = Shape(bpf.ARRAY, 4, 4, 1)
_NETWORKS = Shape(bpf.LPM_TRIE, _PLACES.size, _SPANS.size, MAX_NETWORKS, bpf.NO_PREALLOC)
_NAMES = Shape(bpf.HASH, _PLACE.size, _NAME.size, 2 * MAX_NAMES, bpf.NO_PREALLOC)
_COUNTED = Shape(bpf.PERCPU_ARRAY, 4, _COUNTERS.size, 1)
_NEVER = Shape(bpf.LPM_TRIE, _PREFIX.size, 1, MAX_NEVER, bpf.NO_PREALLOC)
_RING = Shape(bpf.RINGBUF, 0, 0, _DENIALS_BYTES)

_MAPPED = bytes(10) + b"\xff\xff"
_MAPPED_NETWORK = IPv6Network("::ffff:0:0/96")
_NOTHING: dict[Network, Sequence[PortSpan]] = {IPv4Network("0.0.0.0/0"): ()}
"""Else an IPv4 address would be found in an IPv6 network as wide as all."""
_ZERO = _U32.pack(0)


# Loading.


@contextlib.contextmanager
def load(
    object_file: Path, settings: SlotSettings, pins: Directory, shared: Directory
) -> Iterator[Programs]:
    """Load a slot's filter, its maps pinned; it denies everything until a policy is applied.

    Args:
        object_file: `OBJECT`, compiled.
        settings: of the slot.
        pins: directory for the slot's own maps, empty.
        shared: directory with the maps of the node, for which there was `set_never`.

    Raises:
        OSError: the file is missing, the kernel does not take it, or nobody has said what no slot
            reaches. What is pinned then is the caller's to remove.
    """
    os.stat(Path(shared, "never"))  # a node's barrier is not to be forgotten
    with BpfObject(object_file.read_bytes(), object_file.name) as loaded:
        loaded.set_constants(".rodata.settings", _packed_settings(settings))
        for name in ("active", "networks", "names", "counters"):
            loaded.pin_map(name, Path(pins, name))
        for name in ("never", "denials"):
            loaded.pin_map(name, Path(shared, name))
        loaded.load()
        yield Programs(loaded.program("from_sandbox"), loaded.program("to_sandbox"))


def _packed_settings(settings: SlotSettings) -> bytes:
    return _SETTINGS.pack(
        _mapped(settings.address4),
        settings.address6,
        _mapped(settings.gateway4),
        settings.gateway6,
        settings.slot,
        settings.proxy_port,
        0,
    )


def set_never(shared: Directory, networks: Iterable[Network]) -> None:
    """Say what no slot of the node reaches, in place of what was said; at no moment less than both say.

    Raises:
        OSError: the kernel refused, as too many (`MAX_NEVER`).
    """
    wanted = {_PREFIX.pack(*_prefix(network)): b"\1" for network in networks}
    with _locked(shared), Map.ensure(Path(shared, "never"), _NEVER) as never:
        never.put_all(wanted)
        never.remove_all([prefix for prefix in never.entries() if prefix not in wanted])


# Policies.

Keep = Callable[[bytes, tuple[PortSpan, ...]], tuple[PortSpan, ...]]
"""From a packed address and what it may be used for to what of that stays; nothing: it goes."""


def apply(
    pins: Directory, networks: Mapping[Network, Sequence[PortSpan]], keep_names: Keep | None = None
) -> None:
    """Give a slot a policy in place of the one it has, for every packet at the same moment.

    Args:
        pins: of the slot.
        networks: what may be reached of the addresses whose longest prefix each one is.
        keep_names: None = no address stays that a name gave.

    Raises:
        OSError: the slot is gone, or the kernel refused, as too many; then the old policy holds.
        ValueError: more than `MAX_SPANS` of one network, or an IPv4 network written as IPv6.
    """
    told = [(_prefix(each), _packed(spans)) for each, spans in {**_NOTHING, **networks}.items()]
    with _opened(pins) as slot:
        slot.forget_others()
        following = slot.policy % 0xFFFFFFFF + 1
        slot.networks.put_all(
            {_PLACES.pack(32 + bits, following, base): value for (bits, base), value in told}
        )
        if keep_names:
            slot.names.put_all(dict(_kept(slot, following, keep_names)))
        slot.active.put(_ZERO, _U32.pack(following))


def _kept(slot: _Slot, policy: int, keep: Keep) -> Iterator[tuple[bytes, bytes]]:
    for address, (expires, spans) in slot.held().items():
        if left := keep(_plain(address), spans):
            yield _PLACE.pack(policy, address), _NAME.pack(expires, _packed(left))


class _Slot(NamedTuple):
    """The maps of a slot's policies."""

    active: Map
    networks: Map
    names: Map

    @property
    def policy(self) -> int:
        """The number of the one that holds; 0 = none yet."""
        number: int = _U32.unpack(self.active.get(_ZERO) or _ZERO)[0]
        return number

    def held(self) -> dict[bytes, tuple[int, tuple[PortSpan, ...]]]:
        """Addresses that names gave: when they expire, and for what they may be used."""
        policy = self.policy
        places = ((_PLACE.unpack(key), value) for key, value in self.names.entries().items())
        return {address: _unpacked_name(value) for (of, address), value in places if of == policy}

    def forget_others(self) -> None:
        """Remove what no packet looks at: of the policy before, or of one that never came to hold.

        Not earlier, since a packet may still be on its way when a policy changes.
        """
        policy = self.policy
        for rules, number_at in ((self.networks, 4), (self.names, 0)):
            keys = rules.entries()
            rules.remove_all([k for k in keys if _U32.unpack_from(k, number_at)[0] != policy])


@contextlib.contextmanager
def _opened(pins: Directory) -> Iterator[_Slot]:
    """Alone among all processes: a name added while a policy changes is in both or in the new one."""
    with (
        _locked(pins),
        Map.pinned(Path(pins, "active"), _ACTIVE) as active,
        Map.pinned(Path(pins, "networks"), _NETWORKS) as networks,
        Map.pinned(Path(pins, "names"), _NAMES) as names,
    ):
        yield _Slot(active, networks, names)


# Names.


def name_add(pins: Directory, address: bytes, spans: Sequence[PortSpan], ttl_s: float) -> None:
    """Let a slot reach an address for a time, in place of what was said of it as a name's.

    Of too many those go that have expired longest ago, and with them what connections they have.

    Args:
        pins: of the slot.
        address: packed, 4 or 16 bytes.
        spans: at most `MAX_SPANS`.
        ttl_s: from now.

    Raises:
        OSError: the slot is gone or has no policy; ENOSPC: it holds `MAX_NAMES`, all alive.
        ValueError: more than `MAX_SPANS`.
    """
    value = _NAME.pack(_boot_ns() + int(ttl_s * 1e9), _packed(spans))
    with _opened(pins) as slot:
        if not slot.policy:
            raise OSError(errno.ENOENT, "the slot has no policy", str(pins))
        place = _PLACE.pack(slot.policy, _mapped(address))
        if slot.names.get(place) is None:
            _make_room(slot, pins)
        slot.names.put(place, value)


def names(pins: Directory) -> dict[bytes, Name]:
    """What a slot may reach by names, by packed addresses. Raises OSError: it is gone."""
    now = _boot_ns()
    with _opened(pins) as slot:
        held = slot.held()
    return {
        _plain(address): Name(spans=spans, left_s=(expires - now) / 1e9)
        for address, (expires, spans) in held.items()
    }


def _make_room(slot: _Slot, pins: Directory) -> None:
    """Of a slot that holds too much, remove the older half of what has expired."""
    if len(slot.names.entries()) < MAX_NAMES:
        return
    held, now = slot.held(), _boot_ns()
    if len(held) < MAX_NAMES:
        return
    expired = sorted((end, address) for address, (end, _) in held.items() if end < now)
    if not expired:
        raise OSError(errno.ENOSPC, "too many addresses of names", str(pins))
    gone = expired[: (len(expired) + 1) // 2]
    slot.names.remove_all([_PLACE.pack(slot.policy, address) for _, address in gone])


# What the filter tells.


def counters(pins: Directory) -> Counters:
    """What passed and what did not. Raises OSError: the slot is gone."""
    with Map.pinned(Path(pins, "counters"), _COUNTED) as counted:
        copies = counted.get(_ZERO, bpf.possible_processors()) or b""
    totals = map(sum, zip(*_COUNTERS.iter_unpack(copies), strict=True))
    return Counters(**dict(zip(Counters.__struct_fields__, totals, strict=True)))


class Denials:
    """What was denied to all slots of a node, as it happens. There may be one reader."""

    def __init__(self, shared: Directory) -> None:
        """Begin to listen. Raises OSError."""
        with Map.ensure(Path(shared, "denials"), _RING) as ring:
            self._ring = Ring(ring.descriptor)

    def fileno(self) -> int:
        """Readable when there is something."""
        return self._ring.fileno()

    def read(self) -> list[Denial]:
        """All there is. Does not block. Raises OSError."""
        return [_denial(record) for record in self._ring.read()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End listening; what comes then waits for the next reader, as far as there is room."""
        self._ring.close()


def _denial(record: bytes) -> Denial:
    address, slot, port, reason, inbound, protocol = _DENIAL.unpack(record)
    return Denial(
        slot=slot,
        reason=_REASONS[reason - 1],
        inbound=bool(inbound),
        protocol=protocol,
        address=_plain(address),
        port=port,
    )


# Packing.


def _mapped(address: bytes) -> bytes:
    return _MAPPED + address if len(address) == 4 else address


def _plain(address: bytes) -> bytes:
    return address.removeprefix(_MAPPED)


def _prefix(network: Network) -> tuple[int, bytes]:
    if isinstance(network, IPv4Network):
        return 96 + network.prefixlen, _mapped(network.network_address.packed)
    if network.subnet_of(_MAPPED_NETWORK):
        raise ValueError(f"{network} is IPv4 in the notation of IPv6")
    return network.prefixlen, network.network_address.packed


def _packed(spans: Sequence[PortSpan]) -> bytes:
    if len(spans) > MAX_SPANS:
        raise ValueError(f"{len(spans)} ranges of ports; at most {MAX_SPANS}")
    packed = (_SPAN.pack(s.protocol, _INSPECT * s.inspect, s.low, s.high) for s in spans)
    return _SPANS.pack(len(spans), b"".join(packed))


def _unpacked_name(value: bytes) -> tuple[int, tuple[PortSpan, ...]]:
    expires, verdict = _NAME.unpack(value)
    count, packed = _SPANS.unpack(verdict)
    told = list(_SPAN.iter_unpack(packed))[:count]
    return expires, tuple(PortSpan(p, low, high, bool(f & _INSPECT)) for p, f, low, high in told)


def _boot_ns() -> int:
    """The filter's clock, which goes on while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@contextlib.contextmanager
def _locked(directory: Directory) -> Iterator[None]:
    """Alone among all processes: a name added while a policy changes is in the old or in the new."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
