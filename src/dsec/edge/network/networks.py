"""All of it for a backend: a sandbox's network, from before its first process to after its last.

    slot = await networks.open(sandbox, rules)     # before it is launched into the slot
    await networks.apply(sandbox, rules)           # other rules, in force on return
    await networks.close(sandbox)                  # when nothing of it runs any more

Which slot a sandbox has is written down before it is launched, in a file of its own; what no file of
a known sandbox names is removed by `settle`. Rules live in the slot's pinned maps and in the warden;
the latter is told again by `know` after a restart of the edge.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import anyio
import anyio.abc
import msgspec

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, Unavailable
from dsec.edge.network import filters
from dsec.edge.network.denied import DeniedLog, told
from dsec.edge.network.grammar import is_service
from dsec.edge.network.making import SlotMaker
from dsec.edge.network.policy import Policy, flatten, parse
from dsec.edge.network.router import Facts, Router, RouterConfig
from dsec.edge.network.services import Services
from dsec.edge.network.slots import Slot, SlotLimits, Slots
from dsec.edge.network.warden.client import WardenClient
from dsec.edge.network.warden.messages import Assign, Denied, Reach
from dsec.edge.network.warden.settings import Settings
from dsec.kit.blocking import in_thread
from dsec.linux import network_filter, probes
from dsec.wire.sandbox import NetworkView

logger = logging.getLogger("dsec.edge.network")

Rules = Mapping[str, bool]

LOST = "its network was lost when the edge started again: nothing can be reached"


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """A node's network for sandboxes."""

    router: RouterConfig
    state: Path
    """Where it is written down which sandbox has which slot."""
    program: Path
    """The compiled filter (`bpf/filter_tc.bpf.c`)."""
    services: Services
    limits: SlotLimits = field(default_factory=SlotLimits)
    resolvers: tuple[str, ...] = ()
    """Whom allowed names are asked of, `address` or `address#port`; () = whom the node itself asks."""


class Networks:
    """The networks of one edge's sandboxes. Costs nothing before the first one wants one."""

    def __init__(self, config: NetworkConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._router = Router(config.router)
        self._slots = Slots[Facts](self._router, self._maker, config.limits)
        self._group: anyio.abc.TaskGroup | None = None
        self._warden: WardenClient | None = None
        self._beginning = anyio.Lock()
        self._assigned: dict[str, Slot] = {}
        self._sandboxes: dict[int, str] = {}
        self._denied: dict[str, DeniedLog] = {}
        self._lost: set[str] = set()
        self.missing = "not looked for yet"
        """What the host lacks for it, in words; "" = nothing."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Be ready to make slots, and keep a warden once there are some."""
        await in_thread("disk", self._prepare)
        async with anyio.create_task_group() as self._group, self._slots.running():
            try:
                yield self
            finally:
                self._group.cancel_scope.cancel()

    def _prepare(self) -> None:
        self._config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = probes.tried(partial(probes.network, self._config.program))
        self.missing = "" if found.available else found.detail

    async def open(self, sandbox: str, rules: Rules) -> Slot:
        """A slot with these rules in force.

        Raises:
            Unsupported: this node gives sandboxes no network, or a rule cannot be had here.
            CapacityUnavailable, Unavailable, Conflict: no slot (`Slots.take`).
        """
        slot = await self._slots.take(sandbox)
        try:
            await in_thread("disk", self._write, sandbox, slot)
            await self._begin()
            await self._enforce(sandbox, slot, rules)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._close(sandbox, slot)
            raise
        return slot

    async def know(self, sandbox: str, rules: Rules) -> None:
        """After a restart of the edge: tell the warden of a sandbox that has a slot."""
        if sandbox in self._assigned or sandbox in self._lost:
            return
        if (slot := await in_thread("disk", self._read, sandbox)) is None:
            self._lost.add(sandbox)
            return
        try:
            await self._begin()
            await self._enforce(sandbox, slot, rules)
        except (DsecError, OSError) as exc:
            # Its filter holds to the rules it has; what is missing is the answers to names.
            logger.warning("a network is not whole", extra={"sandbox_id": sandbox, "why": str(exc)})

    async def apply(self, sandbox: str, rules: Rules) -> None:
        """Other rules, in force on return: what they do not allow is cut.

        Raises:
            InvalidRequest, Unsupported: these rules cannot be had here.
            Unavailable: the slot is lost, or its filter does not take them.
        """
        slot = self._assigned.get(sandbox) or await in_thread("disk", self._read, sandbox)
        if slot is None or sandbox in self._lost:
            raise Unavailable(LOST)
        await self._begin()
        await self._enforce(sandbox, slot, rules)

    async def view(self, sandbox: str, rules: Rules) -> NetworkView:
        """What a network is and did."""
        slot = self._assigned.get(sandbox) or await in_thread("disk", self._read, sandbox)
        if slot is None or sandbox in self._lost:
            return NetworkView(enabled=True, rules=dict(rules), detail=LOST)
        counted = await in_thread("names", network_filter.counters, slot.pins)
        log = self._denied.get(sandbox)
        return NetworkView(
            enabled=True,
            address4=slot.address4,
            address6=slot.address6,
            rules=dict(rules),
            sent_bytes=counted.sent_bytes,
            received_bytes=counted.received_bytes,
            sent_packets=counted.sent_packets,
            received_packets=counted.received_packets,
            denied_packets=counted.denied_packets,
            denied=log.events() if log else [],
        )

    async def close(self, sandbox: str) -> None:
        """A sandbox is over: its slot goes, soon. Harmless twice."""
        slot = self._assigned.get(sandbox) or await in_thread("disk", self._read, sandbox)
        self._denied.pop(sandbox, None)
        self._lost.discard(sandbox)
        if slot is not None:
            await self._close(sandbox, slot)

    async def settle(self, known: frozenset[str]) -> list[str]:
        """At the start: keep the slots of known sandboxes, remove all others; what was removed."""
        files = {path.stem: path for path in await in_thread("disk", self._files)}
        strays = sorted(files.keys() - known)
        for sandbox in strays:
            await in_thread("disk", files[sandbox].unlink)
        read = {each: await in_thread("disk", self._read, each) for each in files.keys() & known}
        in_use = {sandbox: slot for sandbox, slot in read.items() if slot is not None}
        for sandbox in await self._slots.adopt(in_use):
            logger.error("a network was lost", extra={"sandbox_id": sandbox})
            self._lost.add(sandbox)
        return [f"network of {sandbox}" for sandbox in strays]

    # slots

    def _maker(self, facts: Facts) -> SlotMaker:
        loader = filters.Loader(self._config.program, facts)
        return SlotMaker(self._config.router, facts, loader)

    async def _close(self, sandbox: str, slot: Slot) -> None:
        self._assigned.pop(sandbox, None)
        self._sandboxes.pop(slot.number, None)
        if self._warden is not None:
            with contextlib.suppress(Unavailable):  # the next warden is not told of it
                await self._warden.forget(slot.address4)
        await in_thread("disk", self._remove, sandbox)
        await self._slots.give_back(slot)

    def _file(self, sandbox: str) -> Path:
        return self._config.state / f"{sandbox}.json"

    def _files(self) -> list[Path]:
        return list(self._config.state.glob("*.json"))

    def _write(self, sandbox: str, slot: Slot) -> None:
        scratch = self._config.state / f".{sandbox}.new"
        scratch.write_bytes(msgspec.json.encode(slot))
        scratch.rename(self._file(sandbox))

    def _remove(self, sandbox: str) -> None:
        self._file(sandbox).unlink(missing_ok=True)

    def _read(self, sandbox: str) -> Slot | None:
        try:
            return msgspec.json.decode(self._file(sandbox).read_bytes(), type=Slot)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    # rules

    async def _policy(self, rules: Rules) -> Policy:
        table = await self._config.services.table() if any(map(is_service, rules)) else {}
        return parse(rules, table)

    async def _enforce(self, sandbox: str, slot: Slot, rules: Rules) -> None:
        """The warden first: what it gives from then on fits the rules that come into force."""
        policy = await self._policy(rules)
        warden = self._having_begun()
        known = self._assigned.get(sandbox) is not None
        self._assigned[sandbox] = slot
        self._sandboxes[slot.number] = sandbox
        held = await warden.assign(_assign(sandbox, slot, policy))
        await in_thread("names", filters.apply, slot.pins, flatten(policy), held)
        if held or known:  # a name may have been given since
            await warden.refill(slot.address4)

    # what runs beside

    async def _begin(self) -> None:
        """Have a warden, and hear of what the filters deny."""
        async with self._beginning:
            if self._warden is not None:
                return
            facts = await self._router.ensure()
            assert self._group is not None  # noqa: S101 - only while running
            warden = WardenClient(_settings(self._config, facts), self._on_denied, self._clock)
            await self._group.start(warden.run)
            self._group.start_soon(self._listen)
            self._warden = warden

    def _having_begun(self) -> WardenClient:
        assert self._warden is not None  # noqa: S101 - after _begin
        return self._warden

    async def _listen(self) -> None:
        with network_filter.Denials(self._config.router.pins / "node") as denials:
            while True:
                await anyio.wait_readable(denials.fileno())
                now = self._clock.now()
                for denial in denials.read():
                    if sandbox := self._sandboxes.get(denial.slot):
                        self._log(sandbox).add([told(denial, now)])

    def _on_denied(self, denied: Denied) -> None:
        if denied.sandbox in self._assigned:
            self._log(denied.sandbox).add(denied.events)

    def _log(self, sandbox: str) -> DeniedLog:
        return self._denied.setdefault(sandbox, DeniedLog())


def _assign(sandbox: str, slot: Slot, policy: Policy) -> Assign:
    return Assign(
        sandbox=sandbox,
        address4=slot.address4,
        address6=slot.address6,
        pins=slot.pins,
        names=policy.names,
        networks=tuple(
            Reach(network=str(rule.network), spans=rule.spans, allowed=rule.allowed)
            for rule in policy.networks
        ),
    )


def _settings(config: NetworkConfig, facts: Facts) -> Settings:
    four, *six = facts.pools.gateways
    return Settings(
        gateway4=str(four),
        gateway6=str(six[0]) if six else "",
        router=str(config.router.namespace),
        resolvers=config.resolvers,
        never=tuple(map(str, facts.never)),
    )
