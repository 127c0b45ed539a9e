"""The terminal's side of `display`; the only module here that needs rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dsec.rollout.lines import COLOURS, mismatch_lines, numbers
from dsec.rollout.outcomes import Outcome
from dsec.rollout.records import Event
from dsec.rollout.report import SuiteReport
from dsec.rollout.tasks import Task

_MARKS: dict[Outcome, str] = {
    "solved": "●",
    "failed": "○",
    "agent_timeout": "◷",
    "verifier": "!",
    "infrastructure": "✗",
}
_RECENT = 6


class LiveDisplay:
    """A row for each task with a mark for each rollout, a bar, and the last things that happened."""

    def __init__(self, tasks: Sequence[Task], total: int, out: TextIO) -> None:
        self._console = Console(file=out)
        self._titles = {task.name: task.title for task in tasks}
        self._marks: dict[str, Text] = {task.name: Text() for task in tasks}
        self._running: Counter[str] = Counter()
        self._recent: list[Text] = []
        self._bar = Progress(
            TextColumn("rollouts"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._whole = self._bar.add_task("rollouts", total=total)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=8,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """Say something that is not about a rollout."""
        self._console.print(text, highlight=False, markup=False)

    def event(self, event: Event) -> None:
        """Take note of an event; the screen is drawn at its own pace."""
        if event.kind == "started":
            self._running[event.task] += 1
        elif event.kind == "call":
            self._say(Text(f"{event.task}/{event.agent}  {event.text}", style="dim"))
        elif event.result is not None:
            self._running[event.task] -= 1
            self._bar.advance(self._whole)
            colour = COLOURS[event.result.outcome]
            self._marks[event.task].append(_MARKS[event.result.outcome], style=colour)
            self._say(Text(f"{event.task}/{event.agent}  {event.result.outcome}", style=colour))

    def report(self, report: SuiteReport) -> None:
        """Print the table and the numbers; they stay on the screen."""
        shown = list(report.outcomes)
        table = Table(title=f"{report.rollouts} rollouts", title_style="bold", pad_edge=False)
        table.add_column("task")
        table.add_column("what is wrong", style="dim", max_width=44, no_wrap=True)
        for outcome in shown:
            table.add_column(outcome.replace("_", " "), style=COLOURS[outcome], justify="right")
        table.add_column("reward", justify="right")
        for task in report.tasks:
            counts = [str(task.outcomes.get(outcome, 0)) for outcome in shown]
            reward = "-" if task.mean_reward is None else f"{task.mean_reward:.2f}"
            table.add_row(task.task, self._titles.get(task.task, ""), *counts, reward)
        self._console.print(table)
        for name, value in numbers(report):
            self._console.print(Text.assemble((f"{name:<26} ", "dim"), value))
        for line in mismatch_lines(report):
            self._console.print(Text(line, style="bold red"))

    def _say(self, line: Text) -> None:
        self._recent = [*self._recent, line][-_RECENT:]

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for name, marks in self._marks.items():
            running = self._running[name]
            table.add_row(name, marks + Text("·" * running, style="dim"))
        return Group(table, self._bar, *(line for line in self._recent))
