"""Verdicts and blame."""

from __future__ import annotations

import pytest

from dsec.base.errors import (
    DsecError,
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    SandboxGone,
    StorageFull,
    Unauthenticated,
    Unavailable,
)
from dsec.rollout.outcomes import OUTCOMES, Outcome, blames_agent, judge, reward_of
from tests.unit.rollout.fakes import BAD, GOOD


def verdict(
    stdout: str, exit_code: int | None = 0, *, late: bool = False, cut: bool = False
) -> Outcome:
    return judge(stdout, exit_code=exit_code, timed_out=late, truncated=cut).outcome


def test_only_solved_and_failed_have_a_reward() -> None:
    assert {outcome: reward_of(outcome) for outcome in OUTCOMES} == {
        "solved": 1.0,
        "failed": 0.0,
        "agent_timeout": None,
        "verifier": None,
        "infrastructure": None,
    }


def test_all_checks_passed() -> None:
    assert verdict(GOOD) == "solved"


def test_a_check_missed() -> None:
    found = judge(BAD, exit_code=0, timed_out=False, truncated=False)
    assert (found.outcome, found.detail) == ("failed", "a: no")
    assert [check.passed for check in found.checks] == [False]


@pytest.mark.parametrize(
    "stdout",
    [
        "",
        "nonsense",
        GOOD.splitlines()[0],
        '{"verdict": {"passed": 0, "failed": 0}}',
        GOOD.replace('"passed": 1', '"passed": 2'),
        GOOD.replace("true", '"true"'),
        "[]\n" + GOOD,
        "3\n",
        '{"verdict": {"passed": 1, "failed": 0}}\n' + GOOD,
        GOOD + "bye",
        "[" * 100_000,
    ],
)
def test_no_clear_verdict_is_the_graders_fault(stdout: str) -> None:
    assert verdict(stdout) == "verifier"


def test_broken_grader_is_never_a_zero() -> None:
    assert verdict(BAD, exit_code=1) == "verifier"
    assert verdict(BAD, exit_code=None, late=True) == "verifier"
    assert verdict(BAD, cut=True) == "verifier"


@pytest.mark.parametrize(
    ("error", "agent"),
    [
        (NotFound("x", kind="path"), True),
        (PermissionDenied("x"), True),
        (InvalidRequest("x"), True),
        (StorageFull("x"), True),
        (NotFound("x", kind="sandbox"), False),
        (Unauthenticated("x"), False),
        (SandboxGone("x"), False),
        (Unavailable("x"), False),
        (InternalError("x"), False),
    ],
)
def test_blame(error: DsecError, agent: bool) -> None:
    assert blames_agent(error) is agent
