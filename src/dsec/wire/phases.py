"""What nobody in a sandbox may touch, and the phases of its life: docs/howto/phases.md."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Seconds = Annotated[float, Meta(gt=0, le=30 * 86400)]
QosClass = Literal["ls", "be"]
"""Latency-sensitive, or best-effort: scheduled only when nobody else wants the processor."""
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]

FileAccess = Literal["deny", "read_only", "no_exec"]


class FileRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A path and what nobody in the sandbox may do with it, root neither: docs/howto/phases.md."""

    path: Annotated[str, Meta(max_length=4096, pattern=r"^/[^*?\[\]{}\x00]+$")]
    """Absolute, a file or a directory with all that is below it. Not behind a symbolic link."""
    access: FileAccess


class Phase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox may do for a part of its life; what is left out is as its specification says."""

    name: Name
    network_rules: dict[str, bool] | None = None
    files: Annotated[list[FileRule], Meta(max_length=256)] | None = None
    user: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Whom all commands and sessions run as: they may name no other."""
    qos: QosClass | None = None
    ttl_running_stop: Seconds | None = None
    secrets: dict[str, str] = field(default_factory=dict)
    """Environment of its commands and sessions, over the specification's; shown to nobody else."""
    end_processes: bool | None = None
    """End what runs when another phase begins; None = if its files, secrets or user differ. False is
    refused then: processes hold descriptors, memory and environments."""
    final: bool = False
    """No other phase follows it."""


class PhaseChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The phase to enter."""

    name: Name
