"""Results to numbers. Pure: no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from dsec.rollout.outcomes import OUTCOMES, Outcome
from dsec.rollout.records import RolloutResult


class Latency(Struct, frozen=True, kw_only=True):
    """A distribution of seconds; all zero when nothing was measured."""

    count: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


class TaskReport(Struct, frozen=True, kw_only=True):
    """One task's rollouts."""

    task: str
    rollouts: int
    outcomes: dict[Outcome, int]
    mean_reward: float | None
    """Over the rollouts that have a reward; None if none has."""
    mismatches: int


class SuiteReport(Struct, frozen=True, kw_only=True):
    """A whole run. Sizes in bytes."""

    rollouts: int
    outcomes: dict[Outcome, int]
    tasks: list[TaskReport]
    create: Latency
    tool_call: Latency
    rollout: Latency
    sandboxes_created: int
    sandboxes_unstopped: int
    tool_calls: int
    wall_s: float
    rollouts_per_minute: float
    peak_memory_bytes: int
    """Of the sandbox that used the most."""
    mismatches: list[str] = field(default_factory=list)
    """Recorded agents that did not end as their recording says, in words."""

    @property
    def ok(self) -> bool:
        """Whether every rollout ended as expected and every sandbox is known to be stopped."""
        return not self.mismatches and not self.sandboxes_unstopped


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all are not above; 0 for no values."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def latency(values: Iterable[float]) -> Latency:
    """Sum up measured seconds."""
    measured = list(values)
    return Latency(
        count=len(measured),
        p50_s=percentile(measured, 0.50),
        p99_s=percentile(measured, 0.99),
        max_s=max(measured, default=0.0),
    )


def summarize(results: Sequence[RolloutResult], wall_s: float) -> SuiteReport:
    """The report of a run.

    Args:
        results: every rollout, in any order.
        wall_s: from the first one's start to the last one's end.
    """
    created = [seconds for result in results for seconds in result.create_s]
    names = sorted({result.task for result in results})
    return SuiteReport(
        rollouts=len(results),
        outcomes=_count(results),
        tasks=[_task(name, [r for r in results if r.task == name]) for name in names],
        create=latency(created),
        tool_call=latency(call.latency_s for result in results for call in result.calls),
        rollout=latency(result.wall_s for result in results),
        sandboxes_created=len(created),
        sandboxes_unstopped=sum(result.unstopped for result in results),
        tool_calls=sum(len(result.calls) for result in results),
        wall_s=wall_s,
        rollouts_per_minute=60 * len(results) / wall_s if wall_s > 0 else 0.0,
        peak_memory_bytes=max((result.peak_memory_bytes for result in results), default=0),
        mismatches=[_mismatch(result) for result in results if not result.as_expected],
    )


def _count(results: Iterable[RolloutResult]) -> dict[Outcome, int]:
    seen = [result.outcome for result in results]
    return {outcome: seen.count(outcome) for outcome in OUTCOMES if outcome in seen}


def _task(name: str, results: Sequence[RolloutResult]) -> TaskReport:
    rewards = [result.reward for result in results if result.reward is not None]
    return TaskReport(
        task=name,
        rollouts=len(results),
        outcomes=_count(results),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        mismatches=sum(not result.as_expected for result in results),
    )


def _mismatch(result: RolloutResult) -> str:
    said = f"{result.rollout_id} ({result.task}, agent {result.agent})"
    if result.outcome != result.expected:
        said += f": {result.outcome}, expected {result.expected}"
        said += f" - {result.detail}" if result.detail else ""
    return "; ".join([said, *result.surprises])
