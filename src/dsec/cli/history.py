"""What happened in sandboxes, as lines of text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from dsec.base.quantity import format_duration
from dsec.cli.output import Cell, clean
from dsec.wire.sandbox import Recorded

WHAT = 38
WIDTHS = (5, 14, 13, WHAT, 12, 8)
HEADINGS = ("SEQ", "TIME", "OPERATION", "WHAT", "OUTCOME", "TIME")
SAID_ELSEWHERE = frozenset({"user", "env", "timeout_s", "output_limit_bytes"})
"""Arguments that would crowd out what matters."""
IDS = frozenset({"command_id", "key", "session_id"})


def what(entry: Recorded) -> str:
    """What an operation was about, in a few words."""
    args = entry.args
    if command := _command(args):
        return command
    if "path" in args:
        shown = _short(args["path"])
        return f"{shown} -> {_short(args['to'])}" if "to" in args else shown
    if entry.op == "create":
        spec = args.get("spec", args)
        return str(spec.get("image", "")) if isinstance(spec, Mapping) else ""
    if entry.op == "over":
        return str(entry.result.get("reason", ""))
    if isinstance(args.get("name"), str):
        return str(args["name"])
    names = sorted(args.keys() - SAID_ELSEWHERE, key=lambda name: (name in IDS, name))
    return " ".join(f"{name}={_short(args[name])}" for name in names)


def _command(args: Mapping[str, Any]) -> str:
    if isinstance(text := args.get("shell"), str):
        return text
    if isinstance(text, dict):
        return _short(text)
    if isinstance(argv := args.get("argv"), list):
        return shlex.join(_short(word) for word in argv)
    return "(its entrypoint)" if args.get("entrypoint") else ""


def _short(value: object) -> str:
    match value:
        case {"begins": str(start)}:
            return f"{start}…"
        case {"sha256": str(digest), "size_bytes": int(size)}:
            return f"{size} bytes, sha256 {digest[:12]}"
        case bytes():
            return f"{len(value)} bytes"
        case dict() if value and all(isinstance(item, bool) for item in value.values()):
            return " ".join(f"{'+' if allowed else '-'}{rule}" for rule, allowed in value.items())
        case _:
            return str(value)


def outcome(entry: Recorded) -> Cell:
    """How it ended, in one word, and its colour."""
    if entry.ended_at is None:
        return (entry.outcome, "red") if entry.outcome else ("unfinished", "yellow")
    if entry.outcome != "ok":
        return entry.outcome, "red"
    code = entry.result.get("exit_code")
    if isinstance(code, int):
        return f"exit {code}", "red" if code else ""
    return "ok", ""


def took(entry: Recorded) -> str:
    """How long it took."""
    return "" if entry.ended_at is None else format_duration(max(entry.ended_at - entry.at, 0))


def at(seconds: float) -> str:
    """A moment, in local time."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%m-%d %H:%M:%S")


def cut(text: str, width: int) -> str:
    """Text on one line, no longer than `width` characters."""
    shown = clean(" ".join(text.split("\n")))
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"


def cells(entry: Recorded) -> list[Cell]:
    """An operation as a row."""
    style = "dim" if entry.inherited else ""
    return [
        (str(entry.seq), style),
        (at(entry.at), style),
        (entry.op, style),
        (what(entry), style),
        outcome(entry),
        took(entry),
    ]


class Rows:
    """Rows of fixed widths, printed as they come: a trajectory may be long."""

    def __init__(self, headings: Iterable[str], widths: Iterable[int]) -> None:
        """Print the headings."""
        self._widths = [*widths]
        self._terminal = sys.stdout.isatty()
        self.print([(heading, "bold") for heading in headings])

    def print(self, row: Iterable[Cell]) -> None:
        """Print a row: cut to fit, coloured on a terminal."""
        pairs = [cell if isinstance(cell, tuple) else (cell, "") for cell in row]
        fitted = [
            (cut(text, width).ljust(width), style)
            for (text, style), width in zip(pairs, self._widths, strict=True)
        ]
        if self._terminal:
            self._print_rich(fitted)
        else:
            sys.stdout.write("  ".join(text for text, _ in fitted).rstrip() + "\n")

    def _print_rich(self, fitted: list[tuple[str, str]]) -> None:
        from rich.console import Console  # here: only a terminal needs it
        from rich.text import Text

        line = Text("  ").join(Text(text, style) for text, style in fitted)
        Console().print(line, no_wrap=True, overflow="ellipsis")
