"""Sizes and durations as people write and read them."""

from __future__ import annotations

import pytest

from dsec.base.errors import InvalidRequest
from dsec.base.quantity import format_duration, format_size, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("512M", 512 << 20),
        ("4 GiB", 4 << 30),
        ("1.5k", 1536),
        ("2tb", 2 << 40),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1 parsec", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_size_bytes(text)


def test_sizes_and_durations_are_printed() -> None:
    assert [format_size(n) for n in (512, 1536, 24 << 30)] == ["512 B", "1.5 KiB", "24.0 GiB"]
    assert [format_duration(s) for s in (0.0032, 4.5, 725, 12000)] == [
        "3.2 ms",
        "4.5 s",
        "12m05s",
        "3h20m",
    ]
