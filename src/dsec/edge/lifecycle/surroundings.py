"""What all owners of a node share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio.abc

from dsec.base.clock import Clock
from dsec.edge.backends.interface import Backend
from dsec.edge.lifecycle.journal import Journal
from dsec.edge.record import SandboxRecord
from dsec.images.records import Environment
from dsec.wire.sandbox import Fault


async def _always(_of: object) -> None:
    """Nothing stands in the way."""


Changing = Callable[[Backend, Journal, SandboxRecord], Awaitable[SandboxRecord]]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all owners of a node share."""

    node: str
    clock: Clock
    journal: Journal
    group: anyio.abc.TaskGroup
    """Parent of what a sandbox's own events start."""
    on_over: Callable[[Any], None]
    """Called once with an owner, when nothing of its sandbox is left."""
    data_failed_since: Callable[[Environment, str, float], bool]
    """Whether data of a sandbox's environment could not be read at some time since then."""
    faults: Callable[[Environment, str], list[Fault]]
    """What keeps a sandbox on an environment from working as it should, now."""
    last_look: Callable[[Any], Awaitable[None]] = _always
    """Called with an owner whose sandbox is about to be stopped; never raises."""
    admit: Callable[[SandboxRecord], Awaitable[None]] = _always
    """Whether the node has room for a paused one to go on; raises CapacityUnavailable."""
    paused: set[str] = field(default_factory=set)
    """Which are paused; kept by their owners."""
