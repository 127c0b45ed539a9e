"""What is written down of a rollout, and what is told while it runs."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from dsec.rollout.outcomes import Check, Outcome
from dsec.rollout.tasks import Ended

Phase = Literal["create", "setup", "agent", "collect", "verify", "stop"]


class CallRecord(Struct, frozen=True, kw_only=True):
    """One tool call of an agent, as it went this time."""

    step: int
    tool: str
    summary: str
    ended: Ended
    exit_code: int | None = None
    latency_s: float = 0.0
    output_bytes: int = 0
    command_id: str = ""


class RolloutResult(Struct, frozen=True, kw_only=True):
    """What came of one rollout. Times in seconds, sizes in bytes."""

    rollout_id: str
    task: str
    agent: str
    expected: Outcome
    outcome: Outcome
    reward: float | None
    detail: str = ""
    checks: list[Check] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    """Tool calls that did not end as their recording says."""
    create_s: list[float] = field(default_factory=list)
    """One for each sandbox that was created."""
    phases_s: dict[str, float] = field(default_factory=dict)
    tree_bytes: int = 0
    peak_memory_bytes: int = 0
    unstopped: int = 0
    """Sandboxes whose stopping could not be confirmed."""
    wall_s: float = 0.0

    @property
    def as_expected(self) -> bool:
        """Whether everything went as the recording says."""
        return self.outcome == self.expected and not self.surprises


class Event(Struct, frozen=True, kw_only=True):
    """Something a person watching may want to see; `result` comes with the last of a rollout."""

    kind: Literal["started", "phase", "call", "ended"]
    rollout_id: str
    task: str
    agent: str
    text: str = ""
    result: RolloutResult | None = None
