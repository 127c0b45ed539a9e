"""Tasks and results made for tests."""

from __future__ import annotations

from typing import Any

from dsec.rollout.outcomes import Outcome, reward_of
from dsec.rollout.records import RolloutResult
from dsec.rollout.tasks import Agent, Call, Image, ShellCall, Source, Task, TaskLimits, Timeouts

SHA = "a" * 64
DISTRIBUTIONS = {SHA: b"archive"}


def make_agent(*calls: Call, expected: Outcome = "solved", **given: Any) -> Agent:
    return Agent(
        name=given.pop("name", "solves"),
        expected=expected,
        note="",
        calls=list(calls) or [ShellCall(command="true")],
        **given,
    )


def make_task(*agents: Agent, **given: Any) -> Task:
    return Task(
        name=given.pop("name", "sample"),
        title="t",
        difficulty="easy",
        problem="p" * 40,
        source=Source(package="p", version="1", sha256=SHA, import_path="src"),
        requires=given.pop("requires", []),
        image=Image(),
        limits=given.pop("limits", TaskLimits()),
        timeouts=Timeouts(),
        agents=list(agents) or [make_agent()],
        verify={"verify.py": b"..."},
        **given,
    )


def make_result(**given: Any) -> RolloutResult:
    outcome: Outcome = given.pop("outcome", "solved")
    return RolloutResult(
        rollout_id=given.pop("rollout_id", "r1.sample.0"),
        task=given.pop("task", "sample"),
        agent=given.pop("agent", "solves"),
        expected=given.pop("expected", outcome),
        outcome=outcome,
        reward=reward_of(outcome),
        **given,
    )
