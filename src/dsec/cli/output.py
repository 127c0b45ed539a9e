"""What goes to standard output: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import msgspec

from dsec.base.quantity import format_duration

Cell = str | tuple[str, str]
"""Text, or text and a rich style."""

STYLES = {
    "running": "green",
    "creating": "yellow",
    "paused": "cyan",
    "failed": "red",
    "lost": "red",
}
_BIDI = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def clean(text: str) -> str:
    """Text from elsewhere with what a terminal would obey made visible."""
    return "".join(_shown(char) for char in text)


def _shown(char: str) -> str:
    code = ord(char)
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if char in _BIDI or 0xD800 <= code <= 0xDFFF:
        return f"\\u{code:04x}"
    return char


def print_json(value: object) -> None:
    """One document, in ASCII: nothing in it acts on a terminal.

    Every field is there, also those that the API leaves out because they say the usual.
    """
    sys.stdout.write(json.dumps(_whole(value), indent=2) + "\n")


def print_json_line(value: object) -> None:
    """One line, in ASCII, for one of many values that come one after the other."""
    sys.stdout.write(json.dumps(_whole(value)) + "\n")


def _whole(value: object) -> object:
    match value:
        case msgspec.Struct():
            config = type(value).__struct_config__
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            names = value.__struct_fields__, value.__struct_encode_fields__
            fields = zip(*names, strict=True)
            return tag | {encoded: _whole(getattr(value, name)) for name, encoded in fields}
        case dict():
            return {key: _whole(item) for key, item in value.items()}
        case list() | tuple():
            return [_whole(item) for item in value]
        case _:
            return msgspec.to_builtins(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Rows under headings: cut to fit and coloured on a terminal, plain and whole elsewhere."""
    shown = [[_clean_cell(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, shown)
        return
    texts = [list(columns), *([text for text, _ in row] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for line in texts:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _clean_cell(cell: Cell) -> tuple[str, str]:
    text, style = cell if isinstance(cell, tuple) else (cell, "")
    return clean(text), style


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> None:
    from rich.console import Console  # here: only a terminal needs it
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(text, style) for text, style in row))
    Console().print(table)


def note(text: str) -> None:
    """Something beside the result, on standard error."""
    sys.stderr.write(clean(text) + "\n")


def age(seconds: float) -> str:
    """A time span in one short word."""
    if seconds < 60:
        return f"{max(seconds, 0):.0f}s"
    if seconds < 48 * 3600:
        return format_duration(seconds)
    return f"{seconds / 86400:.0f}d"


def styled(state: str) -> Cell:
    """A state in its colour."""
    return state, STYLES.get(state, "dim")
