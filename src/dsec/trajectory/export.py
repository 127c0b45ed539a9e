"""Trajectories for other programs: JSON lines, or Parquet where `pyarrow` is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from dsec.base.errors import Unsupported
from dsec.wire.sandbox import Captured, Recorded

ROWS = 1000
"""In memory at once."""
COLUMNS = {
    "seq": "int64",
    "op": "string",
    "id": "string",
    "caller": "string",
    "at": "float64",
    "ended_at": "float64",
    "outcome": "string",
    "inherited": "bool_",
    "args": "string",
    "result": "string",
    "stdout": "binary",
    "stderr": "binary",
    "stdout_dropped_bytes": "int64",
    "stderr_dropped_bytes": "int64",
}
"""Of the table; `args` and `result` are JSON texts."""


def export(entries: Iterable[Recorded], path: Path) -> int:
    """Write a trajectory, in the format its file's name asks for; how many entries it has.

    Raises:
        Unsupported: neither `.jsonl` nor `.parquet`, or Parquet and no `pyarrow`.
    """
    match path.suffix:
        case ".jsonl" | ".ndjson":
            return to_json_lines(entries, path)
        case ".parquet":
            return to_parquet(entries, path)
        case other:
            raise Unsupported(f"a trajectory is exported to .jsonl or .parquet, not {other!r}")


def to_json_lines(entries: Iterable[Recorded], path: Path) -> int:
    """One JSON object a line; bytes are base64."""
    count = 0
    with path.open("wb") as file:
        for entry in entries:
            file.write(msgspec.json.encode(entry) + b"\n")
            count += 1
    return count


def to_parquet(entries: Iterable[Recorded], path: Path) -> int:
    """A table of `COLUMNS`, a row an operation.

    Raises:
        Unsupported: `pyarrow` is not installed.
    """
    arrow, parquet = _pyarrow()
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in COLUMNS.items()])
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in _batches(entries):
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise Unsupported(
            "Parquet needs pyarrow, which is not installed: pip install 'dsec[parquet]'",
            package="pyarrow",
        ) from None


def _batches(entries: Iterable[Recorded]) -> Iterator[list[dict[str, Any]]]:
    left = iter(entries)
    while rows := [_row(entry) for entry in islice(left, ROWS)]:
        yield rows


def _row(entry: Recorded) -> dict[str, Any]:
    row = {name: getattr(entry, name, None) for name in COLUMNS}
    row["args"] = msgspec.json.encode(entry.args).decode()
    row["result"] = msgspec.json.encode(entry.result).decode()
    for stream in ("stdout", "stderr"):
        kept: Captured | None = getattr(entry, stream)
        row[stream] = kept.join() if kept else None
        row[f"{stream}_dropped_bytes"] = kept.dropped_bytes if kept else 0
    return row
