"""What both versions have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a group may use."""

    memory_bytes: int
    cpu_cores: float
    pids: int
    best_effort: bool = False
    """It runs only when nobody else wants the processor."""


@dataclass(kw_only=True)
class Readings:
    """What a group uses; 0 where it cannot be known."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    pids: int = 0
    oom_kills: int = 0
    processes: list[int] = field(default_factory=list)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where this node's groups are. Journaled: a restarted edge must find the same ones."""

    base: str
    """Name of the node's own directory, `dsec-<node>`."""
    v2: str = ""
    """Directory in the v2 hierarchy that holds the node's; "" = the host has none."""
    v2_controllers: list[str] = msgspec.field(default_factory=list)
    """Controllers to be had there."""
    v2_swap: bool = False
    """Whether v2 can bound swap."""
    v1: dict[str, str] = msgspec.field(default_factory=dict)
    """Controller -> directory that holds the node's, for controllers mounted as v1."""
    idle: bool = False
    """Whether the cpu controller has a class that runs only when nobody else wants to."""
    memsw: bool = False
    """Whether v1 counts swap together with memory."""

    def v2_base(self) -> Path:
        """The node's directory in the v2 hierarchy."""
        return Path(self.v2) / self.base

    def v1_bases(self) -> dict[Path, list[str]]:
        """The node's directories in v1 hierarchies, each with its controllers."""
        bases: dict[Path, list[str]] = {}
        for controller, directory in self.v1.items():
            bases.setdefault(Path(directory) / self.base, []).append(controller)
        return bases
