"""The entry point, with a platform in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import pytest

from dsec.rollout import demo
from dsec.rollout.tasks import Pin
from tests.unit.rollout.fakes import FakeClient
from tests.unit.rollout.test_suite_tasks import AGENTS, HEAD, write_task


class Client(FakeClient):
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    async def fetch_all(
        pins: Iterable[Pin], cache: Path | None, on_fetched: Callable[[Pin, bool], None]
    ) -> dict[str, bytes]:
        assert cache is None
        pins = list(pins)
        for pin in pins:
            on_fetched(pin, True)
        return {pin.sha256: b"" for pin in pins}

    monkeypatch.setattr(demo, "fetch_all", fetch_all)
    monkeypatch.setattr(demo, "DSecClient", Client)
    write_task(tmp_path, HEAD, AGENTS)
    return tmp_path


def test_as_expected(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--tasks", str(suite), "--per-task", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["report"]["outcomes"] == {"solved": 1}
    assert "p 1.0: cached" in said.err


def test_mismatch_exits_non_zero(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--tasks", str(suite), "--per-task", "2"]) == 1
    assert "expected failed" in capsys.readouterr().err


def test_unknown_task(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--tasks", str(suite), "--task", "nope"]) == 64
    assert "no task nope" in capsys.readouterr().err


def test_bad_arguments(suite: Path) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--tasks", str(suite), "--per-task", "0"])
