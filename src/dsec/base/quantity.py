"""Quantities: parse what people write, print what people read."""

from __future__ import annotations

import re

from dsec.base.errors import InvalidRequest

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|k|m|g|t)(?:i?b)?", re.IGNORECASE)
_SCALE = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}


def parse_size_bytes(text: str) -> int:
    """Read `512M`, `4 GiB` or `1000` as bytes; units are powers of 1024.

    Raises:
        InvalidRequest: it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise InvalidRequest(f"{text!r} is not a size such as 512M or 4GiB")
    return int(float(match[1]) * _SCALE[match[2].lower()])


def format_size(size_bytes: float) -> str:
    """Print bytes as `512 B`, `1.5 MiB`, `24.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Print seconds as `3.2 ms`, `4.5 s`, `12m05s`, `3h20m`."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
