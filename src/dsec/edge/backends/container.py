"""Containers: an overlay on shared layers, own namespaces, aether as first process."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import ByteStream

from dsec.base.clock import Clock
from dsec.base.errors import Conflict, InternalError, StartFailed, Unavailable, Unsupported
from dsec.base.quantity import MIB
from dsec.edge.backends.disk import Disks, DiskUse
from dsec.edge.backends.interface import LimitHits
from dsec.edge.backends.launch_spec import (
    UPPER,
    CommandLimits,
    HostFacts,
    bounds_of,
    launch_spec,
    processors_of,
    writable_place,
)
from dsec.edge.channel import gone
from dsec.edge.connection import UnixConnection
from dsec.edge.images import Environments
from dsec.edge.launcher import Launchers
from dsec.edge.network.networks import NetworkConfig, Networks
from dsec.edge.record import SandboxRecord
from dsec.kit.blocking import in_thread
from dsec.kit.recall import Recall
from dsec.linux import hostinfo, probes, processors
from dsec.linux.cgroup import bounding, freezing, groups, reclaiming, refilling
from dsec.linux.cgroup.detect import detect
from dsec.linux.cgroup.interface import Layout
from dsec.linux.disk_use import allocated_bytes
from dsec.linux.long_writes import write_long
from dsec.wire.launch import LaunchNetwork
from dsec.wire.public_v1 import Capability
from dsec.wire.sandbox import NetworkView, Pause, SandboxSpec, Usage

logger = logging.getLogger("dsec.edge.container")

KILL_PATIENCE_S, KILL_PAUSE_S = 10.0, 0.1
DISK_FULL_BYTES = MIB
"""A disk with less than this left counts as full."""
COUNT_PATIENCE_S = 0.3
"""Some 100,000 files are counted by then. Who asks often is not to keep the disk busy."""


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """Where things are on this node."""

    node: str
    state: Path
    """The edge's state directory; what is below it must be on one file system."""
    aether: Path
    """The helper's binary."""
    launchers: int = 0
    """0 = one per processor, at most four."""
    cgroup_parent: str = ""
    """Where the node's groups go in each hierarchy; "" = at its top."""
    commands: CommandLimits = field(default_factory=CommandLimits)
    network: NetworkConfig | None = None
    """None = no sandbox has one."""


class ContainerBackend:
    """Sandboxes as containers of this host."""

    def __init__(self, config: ContainerConfig, environments: Environments, clock: Clock) -> None:
        self._config = config
        self._environments = environments
        self._clock = clock
        self._launchers = Launchers(config.aether, config.launchers)
        self._layout = Layout(base="")
        self._disks = Disks(config.state)
        self._networks = Networks(config.network, clock) if config.network else None
        self._disk_limit = probes.Finding(False, "not looked for yet")
        self._fuse = probes.Finding(False, "not looked for yet")
        self._nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    @property
    def name(self) -> str:
        """As in `SandboxSpec.backend`."""
        return "container"

    def capabilities(self) -> list[Capability]:
        """Whether containers can be had, as found at start."""
        missing = _missing(self._layout)
        return [
            Capability(
                name="container",
                available=not missing,
                needed_for="sandboxes as containers",
                detail=missing or f"{', '.join(_limited(self._layout))} are limited",
            ),
            Capability(
                name="network",
                available=not self._no_network,
                needed_for="sandboxes that may reach something: network_rules",
                detail=self._no_network,
            ),
            Capability(
                name="file_rules",
                available=not missing,
                needed_for="paths denied, read-only or without programs, for root inside too",
                detail=missing or "by mounts; not by AppArmor, BPF LSM or Landlock",
            ),
            Capability(
                name="truthful_limits",
                available=self._fuse.available,
                needed_for="programs inside that ask how much memory and how many processors there are",
                detail=self._fuse.detail,
            ),
        ]

    def refuse(self, spec: SandboxSpec) -> None:
        """Check what can be known before; see `Backend.refuse`."""
        if missing := _missing(self._layout):
            raise Unsupported(f"this node cannot hold containers: {missing}", backend=spec.backend)
        if spec.limits.disk_mb is not None and not self._disk_limit.available:
            raise Unsupported(f"limits.disk_mb: not on this node: {self._disk_limit.detail}")
        if spec.network and self._networks and self._networks.missing:
            raise Unsupported(f"network_rules: not on this node: {self._networks.missing}")

    def enforces(self) -> frozenset[str]:
        """See `Enforces.enforces`."""
        inside = {"files", "user", "secrets", "end_processes"}
        return frozenset(inside if self._no_network else inside | {"network_rules"})

    @property
    def _no_network(self) -> str:
        return self._networks.missing if self._networks else "it is switched off: network_slots"

    def warnings(self, spec: SandboxSpec) -> list[str]:
        """What it will not have here, in ways that err to the safe side."""
        said = []
        allowed = sorted(name for name, yes in spec.network_rules.items() if yes)
        if self._networks is None and allowed:
            names = ", ".join(allowed)
            said.append(
                f"network_rules: this node has no network for sandboxes; not reachable: {names}"
            )
        elif self._networks is None and spec.network:
            said.append("network: this node has no network for sandboxes")
        if spec.limits.cpu_cores > (cpus := hostinfo.cpus()):
            said.append(f"cpu_cores: {spec.limits.cpu_cores:g} may be used and the node has {cpus}")
        return said

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Find the control groups and keep the launchers running.

        Raises:
            OSError: the helper cannot be started, or the groups cannot be made.
        """
        self._layout = await in_thread("cgroup", self._settle_layout)
        await in_thread("mount", self._disks.prepare)
        probe = partial(probes.disk_limit, self._config.state)
        self._disk_limit = await in_thread("mount", probes.tried, probe)
        self._fuse = await in_thread("mount", probes.tried, probes.fuse)
        networks = self._networks.running() if self._networks else contextlib.nullcontext()
        async with self._launchers.running(), networks:
            yield
        await in_thread("cgroup", groups.retire, self._layout)

    def _settle_layout(self) -> Layout:
        # A restarted edge must look where its sandboxes' groups are, whatever it would choose now.
        file = self._config.state / "cgroups.json"
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            known = msgspec.json.decode(file.read_bytes(), type=Layout)
            if groups.sandboxes(known):
                return known
        layout = detect(self._config.node, self._config.cgroup_parent)
        groups.prepare(layout)
        layout = msgspec.structs.replace(layout, idle=bounding.has_idle_class(layout))
        # Whole or not at all: half a file would send the next edge to other groups than these.
        scratch = file.with_name(".cgroups.json.new")
        scratch.write_bytes(msgspec.json.encode(layout))
        scratch.rename(file)
        return layout

    async def launch(self, record: SandboxRecord) -> None:
        """Mount its disk and layers, open its network, and have a launcher do the rest."""
        if (size_mb := record.spec.limits.disk_mb) is not None:
            await in_thread("mount", self._disks.make, record.path, size_mb)
        layers = await self._environments.mount(
            record.environment,
            record.id,
            trace=record.spec.trace or "",
            record=record.spec.record_trace,
        )
        spec = launch_spec(
            record,
            [str(path) for path in layers],
            self._layout,
            self._config.commands,
            HostFacts(nofile_max=self._nofile, fuse=self._fuse.available),
            await self._environments.mends(record.environment, layers),
        )
        spec.network = await self._open_network(record)
        try:
            reply = await self._launchers.launch(spec)
        except Unavailable as exc:
            raise StartFailed(exc.message, step="launcher") from exc
        logger.debug("launched", extra={"sandbox_id": record.id, "micros": reply.micros})

    async def _open_network(self, record: SandboxRecord) -> LaunchNetwork | None:
        if not record.spec.network or self._networks is None:
            return None
        slot = await self._networks.open(record.id, record.spec.network_rules)
        resolvers = [address for address in (slot.gateway4, slot.gateway6) if address]
        return LaunchNetwork(namespace=slot.namespace, resolvers=resolvers)

    async def network(self, record: SandboxRecord) -> NetworkView:
        """See `NetworkOf.network`."""
        if self._networks is None:
            return NetworkView(rules=record.spec.network_rules)
        return await self._networks.view(record.id, record.spec.network_rules)

    async def apply_network(self, record: SandboxRecord) -> None:
        """See `NetworkOf.apply_network`."""
        if self._networks is None:
            raise Unsupported(f"no network for sandboxes on this node: {self._no_network}")
        await self._networks.apply(record.id, record.spec.network_rules)

    async def connect(self, record: SandboxRecord) -> ByteStream:
        """Connect to its socket."""
        # After a restart of the edge nobody knows yet that the layers are in use, or what a warden
        # is to answer.
        self._environments.rebuild_pins([(record.id, record.environment.layers)])
        if record.spec.network and self._networks:
            await self._networks.know(record.id, record.spec.network_rules)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await _connect(sock, record)
            return await UnixConnection.open(sock)
        except BaseException:
            sock.close()
            raise

    async def kill(self, record: SandboxRecord) -> None:
        """Kill its whole group.

        Raises:
            InternalError: some of it does not end.
        """
        await self._kill(record.id)

    async def _kill(self, sandbox: str) -> None:
        # Waited for without a thread: a few that hang in the kernel must not hold up the others.
        until = anyio.current_time() + KILL_PATIENCE_S
        while True:
            try:
                await in_thread("cgroup", groups.kill, self._layout, sandbox)
            except TimeoutError as exc:
                if anyio.current_time() > until:
                    raise InternalError(str(exc)) from exc
                await anyio.sleep(KILL_PAUSE_S)
            else:
                return

    async def clean(self, record: SandboxRecord) -> None:
        """Remove groups, socket, mounts, network and disk."""
        await self._environments.release(record.id)
        if record.spec.network and self._networks:
            await self._networks.close(record.id)
        try:
            await in_thread("cgroup", self._remove, record.id, Path(record.socket))
            if record.spec.limits.disk_mb is not None:
                await in_thread("mount", self._disks.remove, record.path)
        except OSError as exc:
            raise InternalError(f"{record.id} is not wholly removed: {exc}") from exc

    def _remove(self, sandbox: str, address: Path) -> None:
        groups.remove(self._layout, sandbox)
        address.unlink(missing_ok=True)

    async def freeze(self, record: SandboxRecord) -> None:
        """Freeze its whole group.

        Raises:
            SandboxGone: it is not there. InternalError: some of it does not stand still.
        """
        try:
            await in_thread("cgroup", freezing.freeze, self._layout, record.id)
        except FileNotFoundError as exc:
            raise gone(record.id, "died", "it has no control groups") from exc
        except TimeoutError as exc:
            raise InternalError(str(exc)) from exc

    async def thaw(self, record: SandboxRecord) -> None:
        """Let its group go on, and use no more swap than it does."""
        # Threads of its own, whose work is quick: those of freezing may all wait for a slow disk.
        try:
            await in_thread("thaw", self._thaw, record.id)
        except FileNotFoundError as exc:
            raise gone(record.id, "died", "it has no control groups") from exc

    def _thaw(self, sandbox: str) -> None:
        reclaiming.restrain(self._layout, sandbox)
        freezing.thaw(self._layout, sandbox)

    async def reclaim(self, record: SandboxRecord, recall: Recall) -> Pause:
        """Take back its memory, what it has of its own into the host's swap."""
        at = self._clock.now()
        force = partial(write_long, self._config.aether)
        work = partial(reclaiming.reclaim, self._layout, record.id, recall, force)
        taken = await in_thread("reclaim", work)
        return Pause(
            at=at,
            memory_before_bytes=taken.before_bytes,
            memory_after_bytes=taken.after_bytes,
            swapped_bytes=taken.swapped_bytes,
            detail=taken.detail,
        )

    async def refill(self, record: SandboxRecord) -> None:
        """Read ahead what its processes have in swap."""
        await in_thread("refill", refilling.refill, self._layout, record.id)

    async def resize(self, record: SandboxRecord) -> None:
        """Change its groups, then where it runs, and last, as there is no way back, its disk."""
        try:
            await in_thread("cgroup", self._bound, record)
        except FileNotFoundError as exc:
            raise gone(record.id, "died", "it has no control groups") from exc
        except bounding.InUse as exc:
            raise _in_use(record, exc.used_bytes) from exc
        except OSError as exc:
            raise InternalError(f"its limits could not be changed: {exc}") from exc
        if (size_mb := record.spec.limits.disk_mb) is not None:
            await in_thread("mount", self._disks.grow, record.path, size_mb)

    def _bound(self, record: SandboxRecord) -> None:
        bounding.bound(self._layout, record.id, bounds_of(record))
        if self._fuse.available:
            chosen = processors_of(record, processors.usable())
            bounding.run_on(self._layout, record.id, frozenset(chosen))

    async def usage(self, record: SandboxRecord) -> Usage:
        """Read its groups, and count what it has written."""
        readings = await in_thread("cgroup", groups.usage, self._layout, record.id)
        disk = await in_thread("disk", self._disk_use, record)
        return Usage(
            at=self._clock.now(),
            cpu_s=readings.cpu_s,
            memory_bytes=readings.memory_bytes,
            memory_peak_bytes=readings.memory_peak_bytes,
            memory_limit_bytes=readings.memory_limit_bytes,
            pids=readings.pids,
            oom_kills=readings.oom_kills,
            disk_bytes=disk.used_bytes,
            disk_limit_bytes=disk.limit_bytes,
        )

    async def limit_hits(self, record: SandboxRecord) -> LimitHits:
        """Read its groups, and how full its own disk is."""
        return await in_thread("cgroup", self._limit_hits, record)

    def _limit_hits(self, record: SandboxRecord) -> LimitHits:
        full = False
        if (size_mb := record.spec.limits.disk_mb) is not None:
            use = self._disks.use(record.path, size_mb)
            full = use.used_bytes + DISK_FULL_BYTES > use.limit_bytes > 0
        return LimitHits(
            oom_kills=groups.oom_kills(self._layout, record.id),
            pids=groups.pids_limit_hits(self._layout, record.id),
            disk_full=full,
        )

    def _disk_use(self, record: SandboxRecord) -> DiskUse:
        if (size_mb := record.spec.limits.disk_mb) is not None:
            return self._disks.use(record.path, size_mb)
        return DiskUse(allocated_bytes(record.path / UPPER, COUNT_PATIENCE_S), 0)

    def writable(self, record: SandboxRecord) -> Path:
        """Its overlay's upper directory."""
        return writable_place(record) / UPPER

    def oom_kills(self, record: SandboxRecord) -> int:
        """One small file of the kernel's own, some 20 microseconds: no thread is worth it."""
        return groups.oom_kills(self._layout, record.id)

    async def strays(self, known: frozenset[str]) -> list[str]:
        """Remove groups and disks of this node that belong to no sandbox."""
        removed, kept = [], set(known)
        for sandbox in await in_thread("cgroup", groups.sandboxes, self._layout):
            if sandbox in known:
                continue
            try:
                await self._kill(sandbox)
                await in_thread("cgroup", groups.remove, self._layout, sandbox)
            except (InternalError, OSError):  # the others shall go all the same
                logger.exception("a stray could not be removed", extra={"sandbox_id": sandbox})
                kept.add(sandbox)
                continue
            await self._environments.release(sandbox)
            removed.append(f"control groups of {sandbox}")
        if self._networks:
            removed += await self._networks.settle(frozenset(kept))
        # Last: nothing runs on these any more.
        disks = await in_thread("mount", self._disks.strays, frozenset(kept))
        return removed + [f"disk of {sandbox}" for sandbox in disks]

    def epitaph(self, sandbox: str) -> str:
        """How its first process ended."""
        return self._launchers.epitaph(sandbox)


_LACKING = frozenset({errno.ENOMEM, errno.ENOBUFS, errno.ENFILE, errno.EMFILE})
"""What the host lacks for a moment says nothing of the sandbox."""


async def _connect(sock: socket.socket, record: SandboxRecord) -> None:
    """Connect without blocking; a full backlog (EAGAIN) is waited out within the deadline."""
    while True:
        code = sock.connect_ex(record.socket)
        if not code:
            return
        if code in _LACKING:
            raise OSError(code, os.strerror(code), record.socket)
        if code != errno.EAGAIN:
            raise gone(record.id, "died", f"its socket does not answer: {errno.errorcode[code]}")
        await anyio.sleep(0.005)


def _in_use(record: SandboxRecord, used_bytes: int) -> Conflict:
    asked_mb, used_mb = record.spec.limits.memory_mb, -(-used_bytes // MIB)
    return Conflict(
        f"memory_mb: {asked_mb} would be less than the {used_mb} MiB that it uses",
        asked_mb=asked_mb,
        used_mb=used_mb,
    )


def _missing(layout: Layout) -> str:
    lacking = {"memory", "cpu", "pids"} - set(_limited(layout))
    if lacking:
        return f"no control group controller for {', '.join(sorted(lacking))} is mounted"
    return "" if layout.v2 else "no cgroup v2 hierarchy is mounted"


def _limited(layout: Layout) -> list[str]:
    have = {*layout.v1, *layout.v2_controllers}
    return [name for name in ("memory", "cpu", "pids") if name in have]
