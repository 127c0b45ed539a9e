"""What may come of a rollout, and how a grader's output and an exception are told apart.

    solved          every check passed                                  reward 1
    failed          the agent's fault: a check did not pass             reward 0
    agent_timeout   the agent's time was up before it was done          no reward
    verifier        the grader broke: crash, time-out, no verdict       no reward
    infrastructure  the platform broke: no sandbox, lost, unreachable   no reward

A rollout without a reward is to be masked out or run again, never counted as zero.
"""

from __future__ import annotations

import json
from typing import Literal

from msgspec import Struct, field

from dsec.base.errors import DsecError, NotFound, RequestError, StorageFull, Unauthenticated

Outcome = Literal["solved", "failed", "agent_timeout", "verifier", "infrastructure"]
OUTCOMES: tuple[Outcome, ...] = ("solved", "failed", "agent_timeout", "verifier", "infrastructure")
_REWARDS: dict[Outcome, float] = {"solved": 1.0, "failed": 0.0}


def reward_of(outcome: Outcome) -> float | None:
    """1, 0, or None where nothing may be concluded about the agent."""
    return _REWARDS.get(outcome)


class Check(Struct, frozen=True, kw_only=True):
    """One line of a verdict."""

    name: str
    passed: bool
    detail: str = ""


class Verdict(Struct, frozen=True, kw_only=True):
    """What a verifier's run amounts to."""

    outcome: Outcome
    detail: str = ""
    checks: list[Check] = field(default_factory=list)


def judge(stdout: str, *, exit_code: int | None, timed_out: bool, truncated: bool) -> Verdict:
    """Read a verifier's output. Anything but a complete, consistent verdict is the grader's fault."""
    if timed_out:
        return Verdict(outcome="verifier", detail="the verifier ran out of time")
    if exit_code != 0:
        return Verdict(outcome="verifier", detail=f"the verifier ended with status {exit_code}")
    if truncated:
        return Verdict(outcome="verifier", detail="the verifier said too much")
    try:
        lines = [json.loads(line) for line in stdout.splitlines() if line.strip()]
        checks = [
            Check(name=line["check"], passed=line["passed"] is True, detail=line.get("detail", ""))
            for line in lines[:-1]
        ]
        said = lines[-1]["verdict"]
        passed = sum(check.passed for check in checks)
        complete = said == {"passed": passed, "failed": len(checks) - passed} and bool(checks)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        complete = False
        checks = []
    if not complete:
        return Verdict(outcome="verifier", detail="the verifier gave no verdict", checks=checks)
    missed = [check for check in checks if not check.passed]
    if missed:
        return Verdict(
            outcome="failed", detail=f"{missed[0].name}: {missed[0].detail}", checks=checks
        )
    return Verdict(outcome="solved", checks=checks)


def blames_agent(error: DsecError) -> bool:
    """Whether an error of a tool call is the agent's (no such file, disk full) or the platform's.

    A NotFound about the sandbox itself, and a key that is no longer valid, are not the agent's.
    """
    if isinstance(error, NotFound):
        return error.details.get("kind") != "sandbox"
    return isinstance(error, (RequestError, StorageFull)) and not isinstance(error, Unauthenticated)
