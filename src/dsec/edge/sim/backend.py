"""The simulated backend: the seam of `edge/backends/interface.py` over sandboxes in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
from anyio.abc import ByteStream

from dsec.base.clock import Clock, SystemClock
from dsec.base.errors import InternalError, SandboxGone, StartFailed
from dsec.edge.record import SandboxRecord
from dsec.edge.sim.aether import Identity, SimAether
from dsec.edge.sim.commands import Rules
from dsec.edge.sim.faults import LAUNCH_STEPS, Faults
from dsec.kit.recall import Recall
from dsec.wire.public_v1 import Capability
from dsec.wire.sandbox import NetworkView, Pause, SandboxSpec, Usage

WARNING = "simulated: commands are an imitation in memory; nothing is isolated because nothing runs"
UNREACHABLE = "simulated: rules are kept and nothing is reachable, for nothing runs"
PAUSED = "simulated: nothing is heard of it, but its commands go on"


class SimHost:
    """The machine the sandboxes are on. A test that restarts an edge keeps its host."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, SimAether] = {}
        self.epitaphs: dict[str, str] = {}
        self.rules: dict[str, dict[str, bool]] = {}
        """Network rules in force; only of sandboxes with a network."""
        self._group: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be the parent of all that happens in the sandboxes."""
        async with anyio.create_task_group() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                group.cancel_scope.cancel()

    @property
    def up(self) -> bool:
        """Whether anything can live here."""
        return self._group is not None

    def boot(self, identity: Identity, clock: Clock) -> SimAether:
        """A new sandbox.

        Raises:
            StartFailed: the host is not running.
        """
        if self._group is None:
            raise StartFailed("the simulated host is not running", step="clone")
        aether = self.sandboxes[identity.id] = SimAether(identity, self._group, clock)
        return aether

    def drop_channel(self, sandbox: str) -> None:
        """Break the connection to a sandbox, which lives on."""
        if aether := self.sandboxes.get(sandbox):
            aether.drop_connection()

    def kill(self, sandbox: str, epitaph: str = "") -> None:
        """End a sandbox at once; what it was made of stays until it is cleaned."""
        aether = self.sandboxes.get(sandbox)
        if aether is not None and not aether.dead:
            aether.die()
            self.epitaphs[sandbox] = epitaph


class SimBackend:
    """Sandboxes in memory. It keeps the promises of the protocol, and isolates nothing."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        host: SimHost | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.host = host or SimHost()
        self._clock = clock or SystemClock()

    @property
    def name(self) -> str:
        """As in `SandboxSpec.backend`."""
        return "sim"

    def capabilities(self) -> list[Capability]:
        """One entry, for `dsec doctor`."""
        return [
            Capability(name="sim", available=True, needed_for="trying out, tests", detail=WARNING)
        ]

    def warnings(self, spec: SandboxSpec) -> list[str]:
        """What whoever gets such a sandbox must know."""
        said = [WARNING]
        if allowed := sorted(name for name, yes in spec.network_rules.items() if yes):
            said.append(f"network_rules: simulated; not reachable: {', '.join(allowed)}")
        elif spec.network:
            said.append(f"network: {UNREACHABLE}")
        if spec.limits.disk_mb is not None:
            said.append("disk_mb: simulated files have no limit of their own")
        return said

    def refuse(self, spec: SandboxSpec) -> None:
        """Nothing is beyond a simulation."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Hold the host, unless somebody else does."""
        return _nothing() if self.host.up else self.host.running()

    async def launch(self, record: SandboxRecord) -> None:
        """Make the sandbox.

        Raises:
            StartFailed: told to fail, or the host is down.
        """
        await anyio.sleep(self.faults.launch_delay_s)
        for step in LAUNCH_STEPS:
            await self.faults.pass_step(step)
        self.host.boot(identity_of(record), self._clock)
        if record.spec.network:
            self.host.rules[record.id] = record.spec.network_rules

    async def connect(self, record: SandboxRecord) -> ByteStream:
        """Reach its aether.

        Raises:
            SandboxGone: it is not there. Unavailable: told to fail.
        """
        await self.faults.pass_connect()
        aether = self.host.sandboxes.get(record.id)
        if aether is None or aether.dead:
            raise SandboxGone(f"sandbox {record.id} is gone", reason="died")
        return aether.connect()

    async def kill(self, record: SandboxRecord) -> None:
        """End all its processes."""
        await self.faults.pass_gate("kill")
        self.host.kill(record.id)

    async def clean(self, record: SandboxRecord) -> None:
        """Forget it.

        Raises:
            InternalError: told to fail.
        """
        await self.faults.pass_gate("clean")
        if self.faults.fail_cleans > 0:
            self.faults.fail_cleans -= 1
            raise InternalError(f"simulated: cannot remove what is left of {record.id}")
        self.host.kill(record.id)
        self.host.sandboxes.pop(record.id, None)
        self.host.rules.pop(record.id, None)

    async def freeze(self, record: SandboxRecord) -> None:
        """Have it neither hear nor say anything.

        Raises:
            SandboxGone: it is not there. InternalError: told to fail.
        """
        await self.faults.pass_change("freeze")
        self._alive(record).freeze()

    async def thaw(self, record: SandboxRecord) -> None:
        """Have it go on.

        Raises:
            SandboxGone: it is not there. InternalError: told to fail.
        """
        await self.faults.pass_change("thaw")
        self._alive(record).thaw()

    async def reclaim(self, record: SandboxRecord, recall: Recall) -> Pause:
        """Count what would be given back."""
        await self.faults.pass_gate_unless("reclaim", recall)
        size = self._alive(record).usage().memory_bytes
        return Pause(
            at=self._clock.now(), memory_before_bytes=size, swapped_bytes=size, detail=PAUSED
        )

    async def refill(self, record: SandboxRecord) -> None:
        """Nothing was taken."""

    def _alive(self, record: SandboxRecord) -> SimAether:
        aether = self.host.sandboxes.get(record.id)
        if aether is None or aether.dead:
            raise SandboxGone(f"sandbox {record.id} is gone", reason="died")
        return aether

    async def resize(self, record: SandboxRecord) -> None:
        """Count other limits from now on.

        Raises:
            SandboxGone: it is not there. Conflict: it uses more memory. InternalError: told to fail.
        """
        await self.faults.pass_change("resize")
        self._alive(record).resize(record.spec.limits)

    async def network(self, record: SandboxRecord) -> NetworkView:
        """Its rules."""
        rules = self.host.rules.get(record.id, {})
        return NetworkView(enabled=True, rules=rules, detail=UNREACHABLE)

    async def apply_network(self, record: SandboxRecord) -> None:
        """Keep other rules from now on.

        Raises:
            SandboxGone: it is not there. InternalError: told to fail.
        """
        await self.faults.pass_change("network")
        self._alive(record)
        self.host.rules[record.id] = record.spec.network_rules

    async def usage(self, record: SandboxRecord) -> Usage:
        """What it uses."""
        aether = self.host.sandboxes.get(record.id)
        return aether.usage() if aether else Usage(at=self._clock.now())

    def writable(self, record: SandboxRecord) -> Path | None:
        """None: its files are in memory."""
        del record
        return None

    async def strays(self, known: frozenset[str]) -> list[str]:
        """Forget sandboxes nobody knows."""
        unknown = [sandbox for sandbox in self.host.sandboxes if sandbox not in known]
        for sandbox in unknown:
            self.host.kill(sandbox)
            del self.host.sandboxes[sandbox]
            self.host.rules.pop(sandbox, None)
        return [f"simulated sandbox {sandbox}" for sandbox in unknown]

    def epitaph(self, sandbox: str) -> str:
        """How it ended, if it ended by itself."""
        return self.host.epitaphs.get(sandbox, "")


def identity_of(record: SandboxRecord) -> Identity:
    """What a record means for the sandbox itself."""
    spec, image = record.spec, record.image
    return Identity(
        id=record.id,
        hostname=spec.hostname or record.id,
        limits=spec.limits,
        rules=Rules(
            env={**image.env, **spec.env},
            workdir=spec.workdir or image.workdir or "/",
            user=spec.init_user or image.user or "root",
        ),
    )


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield
