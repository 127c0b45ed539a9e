"""A plugin of pytest in the guest: each report as a line of JSON into the virtio port `reports`.

Lines leave at once: what a guest that hangs has done before is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import pytest

PORTS = Path("/sys/class/virtio-ports")


def _port() -> Path:
    for entry in PORTS.iterdir():
        if (entry / "name").read_text().strip() == "reports":
            return Path("/dev") / entry.name
    raise FileNotFoundError("no virtio port has the name `reports`")


class Reporter:
    """Writes the lines."""

    def __init__(self, port: TextIO) -> None:
        self._port = port

    def _write(self, line: dict[str, Any]) -> None:
        self._port.write(json.dumps(line) + "\n")
        self._port.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(
            {
                "id": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
                "text": _text(report),
            }
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write({"when": "collect", "id": report.nodeid, "text": report.longreprtext})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write({"end": int(exitstatus)})


def _text(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    sections = [f"--- {name} ---\n{content}" for name, content in report.sections]
    return "\n".join([f"{report.when} {report.outcome}", report.longreprtext, *sections]) + "\n"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(_port().open("w")), "guest-reports")
