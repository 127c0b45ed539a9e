"""What the linter found, for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dsec.base.quantity import format_size
from dsec.cli.output import clean
from dsec.wire.public_v1 import LintFinding, LintReport

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_STYLES = {"error": "bold red", "warning": "yellow", "advice": "cyan"}


def table(report: LintReport) -> RenderableType:
    """Findings, worst first, then the advice for each rule once, and a last line that sums up."""
    from rich.console import Group  # here: only who looks needs it
    from rich.table import Table
    from rich.text import Text

    if not report.findings:
        return Text(clean(summary(report)))
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("", "RULE", "WHERE", "WHAT"):
        found.add_column(column, overflow="fold")
    for finding in report.findings:
        severity = Text(finding.severity, _STYLES[finding.severity])
        found.add_row(severity, Text(clean(finding.rule)), _where(finding), _text(finding.message))
    return Group(found, Text(), *_advice(report), Text(), Text(summary(report)))


def _text(foreign: str) -> Text:
    from rich.text import Text

    return Text(clean(foreign))


def _where(finding: LintFinding) -> Text:
    where = _text(finding.path)
    if finding.layer:
        where.append(f"{' ' if finding.path else ''}({clean(finding.layer)})", "dim")
    return where


def _advice(report: LintReport) -> list[Text]:
    by_rule = {f.rule: f.advice for f in report.findings if f.advice}
    return [_text(f"{rule}: {advice}") for rule, advice in by_rule.items()]


def summary(report: LintReport) -> str:
    """How much was found in how much, in one line."""
    counts = Counter(finding.severity for finding in report.findings)
    kinds = (
        _counted(counts["error"], "error", "errors"),
        _counted(counts["warning"], "warning", "warnings"),
        _counted(counts["advice"], "piece of advice", "pieces of advice"),
    )
    looked = f"{report.entries} entries, {format_size(report.size_bytes)}, {report.layers} layers"
    more = "; there is more than is shown" if report.truncated else ""
    return f"{', '.join(kinds)} in {looked}{more}"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
