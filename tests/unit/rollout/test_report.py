"""The numbers."""

from __future__ import annotations

import io

import pytest

from dsec.rollout.display import PlainDisplay, make_display
from dsec.rollout.records import CallRecord, Event
from dsec.rollout.report import latency, percentile, summarize
from tests.unit.rollout.samples import make_result


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [
        ([], 0.5, 0.0),
        ([7], 0.5, 7),
        ([7], 0.99, 7),
        ([1, 2], 0.5, 1),
        ([3, 1, 2], 0.5, 2),
        (list(range(1, 101)), 0.50, 50),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 201)), 0.99, 198),
        ([1] * 50 + [9], 0.99, 9),
    ],
)
def test_percentile(values: list[float], share: float, wanted: float) -> None:
    assert percentile(values, share) == wanted


def test_latency() -> None:
    found = latency(iter([0.3, 0.1, 0.2]))
    assert (found.count, found.p50_s, found.p99_s, found.max_s) == (3, 0.2, 0.3, 0.3)
    assert latency([]).count == 0


def call(latency_s: float) -> CallRecord:
    return CallRecord(step=0, tool="shell", summary="x", ended="ok", latency_s=latency_s)


def test_summarize() -> None:
    report = summarize(
        [
            make_result(create_s=[0.1, 0.2], calls=[call(1), call(3)], peak_memory_bytes=5),
            make_result(outcome="failed", create_s=[0.3, 0.4], peak_memory_bytes=9),
            make_result(task="b", outcome="agent_timeout", create_s=[0.5]),
            make_result(task="b", outcome="infrastructure", expected="solved", unstopped=1),
        ],
        wall_s=30,
    )
    assert report.outcomes == {"solved": 1, "failed": 1, "agent_timeout": 1, "infrastructure": 1}
    assert (report.sandboxes_created, report.sandboxes_unstopped, report.tool_calls) == (5, 1, 2)
    assert (report.create.p50_s, report.tool_call.p50_s, report.tool_call.p99_s) == (0.3, 1, 3)
    assert (report.rollouts_per_minute, report.peak_memory_bytes) == (8, 9)
    assert [(t.task, t.rollouts, t.mean_reward, t.mismatches) for t in report.tasks] == [
        ("b", 2, None, 1),
        ("sample", 2, 0.5, 0),
    ]
    assert len(report.mismatches) == 1
    assert "infrastructure, expected solved" in report.mismatches[0]
    assert not report.ok


def test_nothing_ran() -> None:
    report = summarize([], 0.0)
    assert (report.rollouts, report.rollouts_per_minute, report.tasks) == (0, 0.0, [])
    assert report.ok


def test_surprise_is_a_mismatch() -> None:
    report = summarize([make_result(surprises=["step 1: ok, not timed_out"])], 1)
    assert not report.ok
    assert report.mismatches[0].endswith("step 1: ok, not timed_out")


def test_unstopped_sandbox_is_not_ok() -> None:
    assert not summarize([make_result(unstopped=1)], 1).ok


def test_plain_display() -> None:
    out = io.StringIO()
    results = [make_result(), *[make_result(outcome="verifier", expected="solved")] * 20]
    display = make_display([], len(results), out)
    assert isinstance(display, PlainDisplay)
    with display:
        for result in results:
            display.event(Event(kind="call", rollout_id="r", task="t", agent="a"))
            display.event(Event(kind="ended", rollout_id="r", task="t", agent="a", result=result))
        display.report(summarize(results, 10))
    lines = out.getvalue().splitlines()
    assert "1/21" in lines[0]
    assert "solved" in lines[0]
    assert "NOT AS EXPECTED (solved)" in lines[1]
    assert lines[-1] == "... and 8 more"
