"""A tamper report for people: whatever is inside wrote the names."""

from __future__ import annotations

import pytest

from dsec.cli.tampering import show
from dsec.wire.sandbox import DeniedCall, DeniedTraffic, DiffEntry, TamperReport

EVIL = "/bin/\x1b]0;owned\x07\u202e\n"


def test_names_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    report = TamperReport(
        at=9.0,
        counted=True,
        detail=f"odd: {EVIL}",
        denied_calls=[DeniedCall(name="socket", argument=38, count=7, first_at=1.0, last_at=8.0)],
        agent_signals=[DeniedCall(name="pidfd_open", first_at=1.0, last_at=8.0)],
        system_files=[DiffEntry(path=EVIL, change="removed", kind="file")],
        system_files_count=1,
        network=[DeniedTraffic(reason="name", name=EVIL, first_at=1.0, last_at=8.0)],
    )
    show(report, 9.0)
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert text.replace("\n", "").isprintable(), text
        assert "\\x1b]0;owned\\x07\\u202e\\x0a" in text
    assert ["socket", "38", "7", "8s", "1s"] in [line.split() for line in said.out.splitlines()]


def test_an_empty_report_is_facts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show(TamperReport(at=1.0, counted=True), 1.0)
    assert len(capsys.readouterr().out.splitlines()) == 9
