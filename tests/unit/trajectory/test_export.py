from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from dsec.base.errors import Unsupported
from dsec.trajectory.export import export
from dsec.wire.sandbox import Captured, Recorded

ENTRIES = [
    Recorded(seq=1, op="create", at=1.0, ended_at=2.0, outcome="ok", args={"a": [1]}),
    Recorded(
        seq=2,
        op="command",
        id="c",
        at=3.0,
        stdout=Captured(head=b"\xff", tail=b"z", dropped_bytes=7),
    ),
]


def test_json_lines_are_what_the_api_says(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    assert export(ENTRIES, path) == 2
    lines = path.read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Recorded) for line in lines] == ENTRIES


def test_parquet_has_a_row_for_each(tmp_path: Path) -> None:
    parquet = import_module("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    assert export(ENTRIES * 1500, path) == 3000
    rows = parquet.read_table(path).to_pylist()
    assert len(rows) == 3000
    assert rows[0]["args"] == '{"a":[1]}'
    assert rows[1]["stdout"] == b"\xffz"
    assert (rows[1]["stdout_dropped_bytes"], rows[1]["ended_at"]) == (7, None)


def test_without_pyarrow_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unsupported, match=r"dsec\[parquet\]"):
        export(ENTRIES, tmp_path / "t.parquet")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="csv"):
        export(ENTRIES, tmp_path / "t.csv")
