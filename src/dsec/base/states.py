"""States of a sandbox and the moves between them, as one table."""

from __future__ import annotations

import enum


class SandboxState(enum.StrEnum):
    """Where a sandbox stands. Participles; `stopped`, `failed` and `lost` are final."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"


class StopReason(enum.StrEnum):
    """Why a sandbox is over."""

    REQUESTED = "requested"
    IDLE = "idle"  # ttl_running_stop elapsed with no command and no I/O
    LIFETIME = "lifetime"  # max_lifetime_s elapsed
    DIED = "died"  # its first process or its channel ended
    LAUNCH_FAILED = "launch_failed"
    NODE_LOST = "node_lost"  # gone when the edge came back
    LEASE_LAPSED = "lease_lapsed"  # its job's lease was not renewed in time, and says reap
    LEASE_SUPERSEDED = "lease_superseded"  # its job has a newer epoch, whose lease says reap
    REAPED = "reaped"  # with all of its job, because somebody asked


S = SandboxState
TRANSITIONS: dict[SandboxState, frozenset[SandboxState]] = {
    S.CREATING: frozenset({S.RUNNING, S.STOPPING, S.FAILED, S.LOST}),
    S.RUNNING: frozenset({S.PAUSING, S.PAUSED, S.STOPPING, S.FAILED, S.LOST}),
    S.PAUSING: frozenset({S.PAUSED, S.RUNNING, S.STOPPING, S.FAILED, S.LOST}),
    S.PAUSED: frozenset({S.RESUMING, S.STOPPING, S.FAILED, S.LOST}),
    S.RESUMING: frozenset({S.RUNNING, S.PAUSED, S.STOPPING, S.FAILED, S.LOST}),
    S.STOPPING: frozenset({S.STOPPED, S.FAILED, S.LOST}),
    S.STOPPED: frozenset(),
    S.FAILED: frozenset(),
    S.LOST: frozenset(),
}
"""Allowed moves. A stop is possible from every state that is not final."""

FINAL = frozenset(state for state, moves in TRANSITIONS.items() if not moves)


def may_move(old: SandboxState, new: SandboxState) -> bool:
    """Whether the table allows a move."""
    return new in TRANSITIONS[old]
