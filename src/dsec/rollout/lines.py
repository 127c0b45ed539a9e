"""What both displays say in the same words."""

from __future__ import annotations

from dsec.base.quantity import format_duration, format_size
from dsec.rollout.outcomes import Outcome
from dsec.rollout.report import SuiteReport

COLOURS: dict[Outcome, str] = {
    "solved": "green",
    "failed": "yellow",
    "agent_timeout": "magenta",
    "verifier": "red",
    "infrastructure": "bold red",
}
_MISMATCHES = 12


def numbers(report: SuiteReport) -> list[tuple[str, str]]:
    """The lines below the table: what was measured, and its value for people."""
    create, call = report.create, report.tool_call
    return [
        ("rollouts", f"{report.rollouts} in {format_duration(report.wall_s)}"),
        ("rollouts per minute", f"{report.rollouts_per_minute:.0f}"),
        ("sandboxes created", f"{report.sandboxes_created}"),
        ("sandboxes not stopped", f"{report.sandboxes_unstopped}"),
        ("sandbox creation", _latency(create.p50_s, create.p99_s)),
        (f"tool calls ({call.count})", _latency(call.p50_s, call.p99_s)),
        ("peak memory of a sandbox", format_size(report.peak_memory_bytes)),
        (
            "outcomes as recorded",
            "all" if not report.mismatches else f"{len(report.mismatches)} differ",
        ),
    ]


def mismatch_lines(report: SuiteReport) -> list[str]:
    """What did not end as recorded, the first of it; a platform that is down fills no screens."""
    lines = [f"NOT AS EXPECTED: {mismatch}" for mismatch in report.mismatches[:_MISMATCHES]]
    more = len(report.mismatches) - len(lines)
    return [*lines, f"... and {more} more"] if more else lines


def _latency(p50_s: float, p99_s: float) -> str:
    return f"p50 {format_duration(p50_s)}, p99 {format_duration(p99_s)}"
