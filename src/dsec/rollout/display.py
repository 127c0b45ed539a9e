"""A run for a person: live progress and a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, TextIO

from dsec.base.quantity import format_duration
from dsec.rollout.lines import mismatch_lines, numbers
from dsec.rollout.outcomes import OUTCOMES
from dsec.rollout.records import Event
from dsec.rollout.report import SuiteReport
from dsec.rollout.tasks import Task

_HEADS = {"agent_timeout": "timeout", "infrastructure": "infra"}


class Display(Protocol):
    """Where a run's events and its report are shown."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def note(self, text: str) -> None:
        """Say something that is not about a rollout."""

    def event(self, event: Event) -> None:
        """Show an event."""

    def report(self, report: SuiteReport) -> None:
        """Show the end."""


def make_display(tasks: Sequence[Task], total: int, out: TextIO | None = None) -> Display:
    """A live display if `out` is a terminal and rich is installed, else plain lines."""
    stream = out or sys.stderr
    if stream.isatty():
        try:
            from dsec.rollout.live import LiveDisplay  # rich is optional
        except ImportError:
            pass
        else:
            return LiveDisplay(tasks, total, stream)
    return PlainDisplay(total, stream)


class PlainDisplay:
    """One line for each rollout that ends."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._seen: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._out.flush()

    def note(self, text: str) -> None:
        """Say something that is not about a rollout."""
        self._out.write(text + "\n")
        self._out.flush()

    def event(self, event: Event) -> None:
        """Show a rollout's end; the rest is too much for a log."""
        result = event.result
        if result is None:
            return
        self._seen["all"] += 1
        mark = "" if result.as_expected else f"  NOT AS EXPECTED ({result.expected})"
        self.note(
            f"{self._seen['all']:>4}/{self._total}  {result.task:<28} {result.agent:<22} "
            f"{result.outcome:<14} {format_duration(result.wall_s):>8}{mark}"
        )

    def report(self, report: SuiteReport) -> None:
        """Show the table and the numbers."""
        shown = [outcome for outcome in OUTCOMES if outcome in report.outcomes]
        heads = "".join(f"{_HEADS.get(outcome, outcome):>10}" for outcome in shown)
        self.note(f"\n{'task':<30}{'runs':>6}{heads}{'reward':>9}")
        for task in report.tasks:
            counts = "".join(f"{task.outcomes.get(outcome, 0):>10}" for outcome in shown)
            reward = "-" if task.mean_reward is None else f"{task.mean_reward:.2f}"
            self.note(f"{task.task:<30}{task.rollouts:>6}{counts}{reward:>9}")
        for name, value in numbers(report):
            self.note(f"{name:<26} {value}")
        for line in mismatch_lines(report):
            self.note(line)
