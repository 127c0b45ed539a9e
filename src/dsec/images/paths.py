"""Names from images, as people and programs may be shown them."""

from __future__ import annotations

import re

_UNPRINTED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def shown(path: bytes) -> str:
    """A path with what is not text, or acts on a terminal, escaped."""
    return printable(path.decode("utf-8", "surrogateescape"))


def printable(text: str) -> str:
    """Text from an image with what a terminal would obey, or no document may hold, escaped."""
    return _UNPRINTED.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
