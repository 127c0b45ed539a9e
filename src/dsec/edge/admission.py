"""Whether this node takes one more sandbox now. Pure; refusals carry their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.base.errors import CapacityUnavailable, InvalidRequest
from dsec.base.quantity import MIB, format_size
from dsec.wire.sandbox import Limits


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """What an operator allows on a node."""

    max_sandboxes: int = 10_000
    memory_floor_bytes: int = 512 * MIB
    """A sandbox is taken only while more than this is available on the host."""
    max_launching: int = 8
    """Launches at work at once; more of them only wait for the same two or four processors."""
    max_waiting: int = 2048
    """Creations that may wait for their turn. A longer queue would only time out at its end."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """How the node stands at this moment."""

    live: int
    """Sandboxes that exist, those being made or removed included, paused ones not."""
    waiting: int
    """Creations admitted that have not begun to launch."""
    memory_total_bytes: int
    memory_available_bytes: int
    cpus: int
    uid_runs_free: int


def decide(facts: NodeFacts, limits: AdmissionLimits, asked: Limits) -> None:
    """Admit or refuse.

    Raises:
        InvalidRequest: it could never fit this node.
        CapacityUnavailable: not now; nothing was started.
    """
    # Cores are a ceiling, and overcommitted by design: more than the node has is no reason to refuse.
    _check_fits(facts, asked)
    check_room(facts, limits)
    if facts.uid_runs_free < 1:
        raise CapacityUnavailable("every run of host user ids is in use", live=facts.live)
    if facts.waiting >= limits.max_waiting:
        raise CapacityUnavailable(
            f"{facts.waiting} creations wait already and {limits.max_waiting} may",
            waiting=facts.waiting,
            limit=limits.max_waiting,
        )


def check_room(facts: NodeFacts, limits: AdmissionLimits) -> None:
    """Whether one more sandbox may run, be it a new one or one that was paused.

    Raises:
        CapacityUnavailable: not now.
    """
    if facts.live >= limits.max_sandboxes:
        raise CapacityUnavailable(
            f"{facts.live} sandboxes are live and the node takes {limits.max_sandboxes}",
            live=facts.live,
            limit=limits.max_sandboxes,
        )
    if facts.memory_available_bytes <= limits.memory_floor_bytes:
        raise CapacityUnavailable(
            f"{format_size(facts.memory_available_bytes)} of memory are available and "
            f"{format_size(limits.memory_floor_bytes)} are kept free",
            available_bytes=facts.memory_available_bytes,
            floor_bytes=limits.memory_floor_bytes,
        )


def _check_fits(facts: NodeFacts, asked: Limits) -> None:
    if asked.memory_mb * MIB > facts.memory_total_bytes:
        raise InvalidRequest(
            f"limits.memory_mb is {asked.memory_mb} and the node has "
            f"{facts.memory_total_bytes // MIB} MiB",
            asked_mb=asked.memory_mb,
            total_mb=facts.memory_total_bytes // MIB,
        )
