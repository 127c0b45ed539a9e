from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsec import InvalidRequest
from dsec.cli import parsing
from dsec.cli.attach import Escape
from dsec.cli.copying import place
from dsec.cli.output import clean


def test_times() -> None:
    for text, value in {
        "90": 90, "90s": 90, "1.5": 1.5, "5m": 300, "1h30m": 5400, "2d": 172800, "none": None,
    }.items():  # fmt: skip
        assert parsing.seconds(text) == value
    for text in ("", "0", "-1", "m", "1x", "5 minutes"):
        with pytest.raises(InvalidRequest):
            parsing.seconds(text)


def test_memory() -> None:
    assert [parsing.memory_mb(t) for t in ("512", "512M", "4G", "1.5 GiB")] == [
        512,
        512,
        4096,
        1536,
    ]
    with pytest.raises(InvalidRequest):
        parsing.memory_mb("1k")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "x=y")
    monkeypatch.delenv("NOT_HERE", raising=False)
    assert parsing.environment(["A=", "HERE"]) == {"A": "", "HERE": "x=y"}
    for wrong in ("NOT_HERE", "", "=x"):
        with pytest.raises(InvalidRequest, match="variable"):
            parsing.environment([wrong])


def test_what_must_end_cannot_be_for_ever() -> None:
    assert (parsing.must_end("5m", "--ttl"), parsing.at_most("5m")) == (300, 300)
    assert parsing.at_most("none") == parsing.LONGEST_S
    with pytest.raises(InvalidRequest, match="--ttl: it cannot be never"):
        parsing.must_end("never", "--ttl")


def test_places() -> None:
    assert place("sbx1:/a:b").path == "/a:b"
    assert place("sbx1:").path == "."
    assert place("./sbx:x").sandbox is None
    assert place("c:/x").sandbox is None


def test_text_from_a_sandbox_cannot_act_on_a_terminal() -> None:
    evil = "a\x1b[31m\x9b\x07\r\n\t\x7f\u202eb\udcff\udfff漢"
    assert clean(evil) == ("a\\x1b[31m\\x9b\\x07\\x0d\\x0a\\x09\\x7f\\u202eb\\xff\\udfff漢")


def test_the_escape_counts_at_the_start_of_a_line_only() -> None:
    assert Escape().typed(b"~.")
    assert not Escape().typed(b"x~.")
    escape = Escape()
    assert not any(escape.typed(part) for part in (b"ls ~.", b"\r", b"~", b"x", b"\r"))
    assert not escape.typed(b"~")
    assert escape.typed(b".")


def test_help_is_quick_to_load() -> None:
    code = "import sys, dsec.cli.app; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[3] / "src")},
    )
    heavy = {"sqlalchemy", "starlette", "uvicorn", "httpx", "trio", "pydantic", "websockets"}
    assert not heavy & set(done.stdout.split())
