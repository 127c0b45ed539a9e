"""The seam below the lifecycle: how a sandbox is made, reached and removed.

A backend keeps no state of its own about a sandbox: everything it needs is in the record (journaled
before `launch`), so that `connect`, `kill` and `clean` work just as well after an edge restart.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from anyio.abc import ByteStream

from dsec.edge.record import SandboxRecord
from dsec.kit.recall import Recall
from dsec.wire.public_v1 import Capability
from dsec.wire.sandbox import NetworkView, Pause, SandboxSpec, Usage


class Backend(Protocol):
    """One way of holding sandboxes."""

    @property
    def name(self) -> str:
        """As in `SandboxSpec.backend`."""
        ...

    def capabilities(self) -> list[Capability]:
        """What it can and cannot do here, found out by trying. May be called often: no work."""
        ...

    def refuse(self, spec: SandboxSpec) -> None:
        """Check that it can hold such a sandbox. Pure.

        Raises:
            Unsupported: it cannot; the message names the field.
        """
        ...

    def warnings(self, spec: SandboxSpec) -> list[str]:
        """What of the specification will not be had here, in words for the caller. Pure."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Hold what the backend itself needs (helper processes) while the edge runs.

        Sandboxes outlive it.
        """
        ...

    async def launch(self, record: SandboxRecord) -> None:
        """Make the sandbox; on return `connect` works. On failure nothing of it is left.

        Raises:
            StartFailed: with details step, path, errno.
        """
        ...

    async def connect(self, record: SandboxRecord) -> ByteStream:
        """Reach its aether: a fresh byte stream, on which the caller speaks first.

        The newest connection wins; aether ends older ones. Works after an edge restart too.

        Raises:
            SandboxGone: nothing is there any more.
        """
        ...

    async def kill(self, record: SandboxRecord) -> None:
        """End all its processes at once. Harmless if there are none."""
        ...

    async def clean(self, record: SandboxRecord) -> None:
        """Remove all that `launch` made, however far it came. Idempotent.

        The sandbox's directory itself is the caller's.

        Raises:
            InternalError: something could not be removed; the message names it.
        """
        ...

    async def usage(self, record: SandboxRecord) -> Usage:
        """What it uses, as seen from outside. Fields that cannot be had are 0."""
        ...

    async def freeze(self, record: SandboxRecord) -> None:
        """Stop all its processes where they stand; on return none of them runs. Harmless twice.

        Raises:
            Unsupported: this host cannot. InternalError: some of it does not stand still.
        """
        ...

    async def thaw(self, record: SandboxRecord) -> None:
        """Let a frozen sandbox go on, limited as it was before any pause. Harmless twice."""
        ...

    async def reclaim(self, record: SandboxRecord, recall: Recall) -> Pause:
        """Take back what memory a frozen sandbox can do without, and say how much that was.

        Called off, it soon returns with what it has until then.
        """
        ...

    async def refill(self, record: SandboxRecord) -> None:
        """Bring back what `reclaim` has taken of a sandbox that runs again; best effort.

        What it leaves comes when it is touched.
        """
        ...

    async def resize(self, record: SandboxRecord) -> None:
        """Bring the limits and class of a running sandbox to those of its record.

        Raises:
            Unsupported: a part cannot be changed here. Conflict: it uses more than that.
        """
        ...

    def writable(self, record: SandboxRecord) -> Path | None:
        """Its writable layer, an overlay's upper directory of this host; None = it has none."""
        ...

    async def strays(self, known: frozenset[str]) -> list[str]:
        """Remove what earlier runs left (groups, sockets) of sandboxes that are not `known` ids.

        Returns what was removed, in words for the log.
        """
        ...

    def epitaph(self, sandbox: str) -> str:
        """How the sandbox's first process ended, if the backend heard; else ""."""
        ...


@runtime_checkable
class CountsOomKills(Protocol):
    """A backend whose memory limit kills from outside, where aether cannot see it."""

    def oom_kills(self, record: SandboxRecord) -> int:
        """Processes its memory limit has killed so far. Quick: called after every command."""
        ...


class LimitHits(NamedTuple):
    """How often a sandbox ran into its limits, seen from outside."""

    oom_kills: int
    pids: int
    """Processes and threads that could not begin."""
    disk_full: bool
    """Now."""


@runtime_checkable
class CountsLimitHits(Protocol):
    """A backend that sees its sandboxes run into their limits."""

    async def limit_hits(self, record: SandboxRecord) -> LimitHits:
        """So far."""
        ...


@runtime_checkable
class Enforces(Protocol):
    """A backend that holds sandboxes to file rules and phases."""

    def enforces(self) -> frozenset[str]:
        """What of them: `files`, `user`, `secrets`, `end_processes`, `network_rules`. No work."""
        ...


@runtime_checkable
class NetworkOf(Protocol):
    """A backend whose sandboxes may have a network: those whose specification says `network`."""

    async def network(self, record: SandboxRecord) -> NetworkView:
        """Its addresses, its rules, its traffic, and what was denied."""
        ...

    async def apply_network(self, record: SandboxRecord) -> None:
        """Bring the network of a live sandbox to the rules of its record. Harmless twice.

        On return they are in force, and connections that they do not allow are cut.

        Raises:
            InvalidRequest, Unsupported: these rules cannot be had here; nothing has changed.
        """
        ...
