"""The verb about what was tried in a sandbox: tamper."""

from __future__ import annotations

import typer

from dsec.base.clock import SystemClock
from dsec.base.quantity import format_size
from dsec.cli.boundary import client, verb
from dsec.cli.options import Json, SandboxId
from dsec.cli.output import Cell, age, note, print_json, print_table
from dsec.wire.sandbox import DeniedCall, DeniedTraffic, TamperReport

YES = ("yes", "red")


@verb
async def tamper(sandbox: SandboxId, *, json: Json = False) -> None:
    """Show what was tried in a sandbox and did not work, and which system files were changed.

    Of one that is over: dsec trace SANDBOX shows a step `tamper`, if there was anything to tell.

    Example: dsec tamper sbx...
    """
    async with client() as dsec:
        report = await (await dsec.get(sandbox)).tamper()
    if json:
        print_json(report)
        return
    show(report, SystemClock().now())


def show(report: TamperReport, now: float) -> None:
    """For people; `now` is in seconds since the epoch."""
    _show_facts(report)
    _show(["REFUSED CALL", "ARGUMENT", "COUNT", "FIRST", "LAST"], _calls(report.denied_calls, now))
    _show(["AT THE AGENT", "ARGUMENT", "COUNT", "FIRST", "LAST"], _calls(report.agent_signals, now))
    files: list[list[Cell]] = [[entry.path, entry.change] for entry in report.system_files]
    _show(["SYSTEM FILE", "CHANGE"], files)
    _show(["DENIED", "TO", "COUNT", "FIRST", "LAST"], _traffic(report.network, now))


def _show_facts(report: TamperReport) -> None:
    def count(number: int) -> Cell:
        return (str(number), "red") if number else "0"

    dropped = format_size(report.dropped_bytes)
    facts: list[list[Cell]] = [
        ["refused calls", count(_sum(report.denied_calls) + report.other_calls)],
        ["calls at the agent", count(_sum(report.agent_signals))],
        ["system files changed", count(report.system_files_count)],
        ["output floods", f"{report.flooded_streams}, {dropped} not kept"],
        ["killed for memory", count(report.oom_kills)],
        ["refused processes", count(report.pids_limit_hits)],
        ["disk full", YES if report.disk_full else "no"],
        ["denied traffic", count(sum(entry.count for entry in report.network))],
    ]
    print_table(["FACT", "VALUE"], facts)
    if report.detail:
        note(report.detail)


def _sum(calls: list[DeniedCall]) -> int:
    return sum(call.count for call in calls)


def _show(columns: list[str], rows: list[list[Cell]]) -> None:
    if rows:
        typer.echo("")
        print_table(columns, rows)


def _calls(calls: list[DeniedCall], now: float) -> list[list[Cell]]:
    return [
        [
            call.name,
            "" if call.argument is None else str(call.argument),
            str(call.count),
            age(now - call.first_at),
            age(now - call.last_at),
        ]
        for call in calls
    ]


def _traffic(denied: list[DeniedTraffic], now: float) -> list[list[Cell]]:
    return [
        [
            entry.reason,
            entry.name or f"{entry.protocol} {entry.address} {entry.port or ''}".strip(),
            str(entry.count),
            age(now - entry.first_at),
            age(now - entry.last_at),
        ]
        for entry in denied
    ]
