"""Ports of protocols, and what can be said of several together. Pure.

Sets of ports are tuples of `Span` in order, of which no two touch: the same set is the same tuple.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

Protocol = Literal["tcp", "udp", "icmp"]
TOP = 65535


class Span(Struct, frozen=True, order=True):
    """Ports of one protocol; 0 to 65535 of icmp."""

    protocol: Protocol
    low: int = 0
    high: int = TOP


Spans = tuple[Span, ...]


def merged(spans: Iterable[Span]) -> Spans:
    """All of them together."""
    found: list[Span] = []
    for span in sorted(spans):
        last = found[-1] if found else None
        if last is None or last.protocol != span.protocol or span.low > last.high + 1:
            found.append(span)
        elif span.high > last.high:
            found[-1] = Span(span.protocol, last.low, span.high)
    return tuple(found)


def without(spans: Spans, cuts: Iterable[Span]) -> Spans:
    """What is left of spans when others are taken away."""
    away = merged(cuts)
    return tuple(rest for span in spans for rest in _rest(span, _meeting(span, away)))


def within(spans: Spans, others: Spans) -> bool:
    """Whether others have all of them."""
    return spans == others or not without(spans, others)


def _meeting(span: Span, cuts: Spans) -> Spans:
    first = bisect_left(cuts, (span.protocol, span.low), key=lambda cut: (cut.protocol, cut.high))
    last = bisect_right(cuts, (span.protocol, span.high), key=lambda cut: (cut.protocol, cut.low))
    return cuts[first:last]


def _rest(span: Span, cuts: Spans) -> Iterator[Span]:
    low = span.low
    for cut in cuts:
        if cut.low > low:
            yield Span(span.protocol, low, cut.low - 1)
        low = cut.high + 1
    if low <= span.high:
        yield Span(span.protocol, low, span.high)
