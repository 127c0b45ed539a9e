"""What a run read of an environment, for people: a picture (SVG) and a table.

The picture needs nothing beside it and follows the viewer's light or dark scheme. On top, bytes
over time, stacked by part; below, where in each part they lie. Names come from images: escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from dsec.base.quantity import GIB, KIB, MIB, format_size
from dsec.cli.output import clean
from dsec.wire.public_v1 import TracePart, TraceView

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH = 960
_LEFT, _RIGHT = 84, 936
_SPAN = _RIGHT - _LEFT
_PLOT_HEIGHT = 280
_ROW_HEIGHT = 46
_MAP_HEIGHT = 16
_MAX_PARTS = 12
"""Rows and colours; the parts read least are one more, `others`."""
_MAX_TITLE = 72
_MAX_NAME = 64
_COLOURS = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2",
    "#d6a90a", "#9d755d", "#8a8f98", "#6a5acd", "#2f9e8f", "#c2578f", "#777777",
)  # fmt: skip
_STYLE = """\
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#24292f}
.title{font-size:18px;font-weight:600}.name{font-size:13px}.small{font-size:12px;fill:#59636e}
.card{fill:#ffffff}.grid{stroke:#d8dee4;stroke-width:1}.axis{stroke:#8c959f;stroke-width:1}
.empty{fill:#e9edf1}.total{fill:none;stroke:#24292f;stroke-width:1.6;stroke-linejoin:round}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.card{fill:#151b23}
.grid{stroke:#2f3742}.axis{stroke:#656c76}.empty{fill:#2a313c}.total{stroke:#e6edf3}}"""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A part as it is drawn, or all that are too many."""

    name: str
    colour: str
    members: tuple[int, ...]
    size_bytes: int
    read_bytes: int


def svg(view: TraceView) -> str:
    """The picture, as a document of its own."""
    parts = list(_shown_parts(view))
    top = 96.0
    map_top = top + _PLOT_HEIGHT + 72
    height = map_top + _ROW_HEIGHT * len(parts) + 16
    body = [
        f'<rect class="card" width="{WIDTH}" height="{height:.0f}" rx="8"/>',
        *_heading(view),
        *(_plot(view, parts, top) if view.reads else _nothing(top)),
        *_maps(view, parts, map_top),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    )
    title = f"<title>{_xml(_subject(view), 200)}</title>"
    return "\n".join([head, title, f"<style>{_STYLE}</style>", *body, "</svg>", ""])


def _shown_parts(view: TraceView) -> Iterator[_Shown]:
    """The parts in their order, those read least as one if there are too many."""
    most = sorted(range(len(view.parts)), key=lambda n: -view.parts[n].read_bytes)
    kept = sorted(most[:_MAX_PARTS])
    for place, number in enumerate(kept):
        yield _one(view, _name(view.parts[number]), _COLOURS[place], (number,))
    if rest := tuple(sorted(most[_MAX_PARTS:])):
        yield _one(view, f"{len(rest)} others", _COLOURS[_MAX_PARTS], rest)


def _one(view: TraceView, name: str, colour: str, members: tuple[int, ...]) -> _Shown:
    parts = [view.parts[number] for number in members]
    size = sum(part.size_bytes for part in parts)
    return _Shown(name, colour, members, size, sum(part.read_bytes for part in parts))


def _name(part: TracePart) -> str:
    return f"{part.layer} · {part.digest.removeprefix('sha256:')[:12]}"


def _subject(view: TraceView) -> str:
    what = [view.environment.image]
    what += [view.environment.workspace] if view.environment.workspace else []
    what += view.environment.toolkits
    return f"Read of {' + '.join(what)}"


def _xml(text: str, limit: int = _MAX_NAME) -> str:
    """Foreign text for the document, cut in the middle."""
    plain = clean(text).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")
    if len(plain) > limit:
        plain = plain[: limit // 2] + "…" + plain[-(limit // 2) + 1 :]
    return escape(plain)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    """A line of text; it must be escaped."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _heading(view: TraceView) -> Iterator[str]:
    yield _text(24, 38, _xml(_subject(view), _MAX_TITLE), "title")
    share = _percent(view.read_bytes, view.total_bytes)
    facts = [
        *([f"by {_xml(view.trace)}"] if view.trace else []),
        f"{format_size(view.read_bytes)} of {format_size(view.total_bytes)} ({share})",
        f"first reads over {_time(_end_ms(view))}",
        f"recorded {datetime.fromtimestamp(view.recorded_at, UTC):%Y-%m-%d %H:%M} UTC",
    ]
    yield _text(24, 62, " · ".join(facts), "small")


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %" if share < 10 else f"{share:.0f} %"


def _time(ms: float) -> str:
    return f"{ms:g} ms" if ms < 1000 else f"{ms / 1000:.2f} s"


def _end_ms(view: TraceView) -> int:
    return max((read.at_ms for read in view.reads), default=0)


def _nothing(top: float) -> Iterator[str]:
    yield _text(WIDTH / 2, top + _PLOT_HEIGHT / 2, "nothing was read", "name", "middle")


# -- bytes over time -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to pixels, with ticks at round values."""

    end: float
    start_px: float
    end_px: float

    def at(self, value: float) -> float:
        return self.start_px + (self.end_px - self.start_px) * value / self.end


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not smaller."""
    scale = 10.0 ** math.floor(math.log10(rough))
    return next(m * scale for m in (1, 2, 5, 10) if m * scale >= rough * 0.999)


def _plot(view: TraceView, parts: Sequence[_Shown], top: float) -> Iterator[str]:
    end_ms = max(_end_ms(view), 1)
    across = _Axis(end_ms * 1.02, _LEFT, _RIGHT)
    unit, name = _unit(view.read_bytes)
    step = _round_step(view.read_bytes / unit / 5)
    count = math.ceil(view.read_bytes / unit / step)
    up = _Axis(count * step * unit, top + _PLOT_HEIGHT, top)
    for tick in range(count + 1):
        y = up.at(tick * step * unit)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 8, y + 4, f"{tick * step:g} {name}", "small", "end")
    yield from _time_ticks(across, end_ms, top)
    yield from _areas(view, parts, across, up)


def _unit(size: int) -> tuple[int, str]:
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next((unit for unit in units if size >= unit[0]), (1, "B"))


def _time_ticks(across: _Axis, end_ms: int, top: float) -> Iterator[str]:
    bottom = top + _PLOT_HEIGHT
    scale, unit = (1000, "s") if end_ms >= 2000 else (1, "ms")
    step = _round_step(end_ms / scale / 8)
    for tick in range(int(across.end / scale / step) + 1):
        x = across.at(tick * step * scale)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        yield _text(x, bottom + 20, f"{tick * step:g} {unit}", "small", "middle")
    yield f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    yield _text(_RIGHT, bottom + 40, "time since the recording started", "small", "end")


def _areas(view: TraceView, parts: Sequence[_Shown], across: _Axis, up: _Axis) -> Iterator[str]:
    """One area for each part upon the others, and a line along the top: all of them."""
    times, sums = _cumulated(view, parts, across.end / _SPAN)
    below = [0] * len(times)
    for part, growth in zip(parts, sums, strict=True):
        above = [low + own for low, own in zip(below, growth, strict=True)]
        if growth and growth[-1]:
            path = _steps(times, above, across, up) + _back(times, below, across, up)
            yield f'<path fill="{part.colour}" fill-opacity="0.85" d="{path}Z"/>'
        below = above
    yield f'<path class="total" d="{_steps(times, below, across, up)}"/>'


def _cumulated(
    view: TraceView, parts: Sequence[_Shown], pixel_ms: float
) -> tuple[list[float], list[list[int]]]:
    """Times, at most one for each pixel, and what of each part was read by then."""
    place = {number: index for index, part in enumerate(parts) for number in part.members}
    buckets: dict[int, list[int]] = {}
    for read in sorted(view.reads, key=lambda read: read.at_ms):
        bucket = buckets.setdefault(int(read.at_ms / pixel_ms), [0] * len(parts))
        bucket[place[read.part]] += read.length
    sums: list[list[int]] = [[] for _ in parts]
    for bucket in buckets.values():
        for own, read_bytes in zip(sums, bucket, strict=True):
            own.append((own[-1] if own else 0) + read_bytes)
    return [number * pixel_ms for number in buckets], sums


def _steps(times: Sequence[float], values: Sequence[int], across: _Axis, up: _Axis) -> str:
    moves = (f"H{across.at(t):.1f}V{up.at(v):.1f}" for t, v in zip(times, values, strict=True))
    return f"M{across.start_px:.1f} {up.start_px:.1f}{''.join(moves)}H{across.end_px:.1f}"


def _back(times: Sequence[float], values: Sequence[int], across: _Axis, up: _Axis) -> str:
    """The lower edge, from the right to the left."""
    steps = list(zip(times, values, strict=True))[::-1]
    moves = (f"V{up.at(v):.1f}H{across.at(t):.1f}" for t, v in steps)
    return f"{''.join(moves)}V{up.start_px:.1f}"


# -- where in each part ----------------------------------------------------------------------------


def _maps(view: TraceView, parts: Sequence[_Shown], top: float) -> Iterator[str]:
    for row, part in enumerate(parts):
        y = top + row * _ROW_HEIGHT
        share = _percent(part.read_bytes, part.size_bytes)
        read = f"{format_size(part.read_bytes)} of {format_size(part.size_bytes)} ({share})"
        yield f'<rect fill="{part.colour}" x="24" y="{y - 10:.1f}" width="12" height="12" rx="2"/>'
        yield _text(44, y, _xml(part.name, 80), "name")
        yield _text(_RIGHT, y, read, "small", "end")
        yield (
            f'<rect class="empty" x="24" y="{y + 7:.1f}" width="{_RIGHT - 24}" '
            f'height="{_MAP_HEIGHT}" rx="2"/>'
        )
        yield from _marks(view, part, y + 7)


def _marks(view: TraceView, part: _Shown, y: float) -> Iterator[str]:
    """A mark for each run of pixels with about as much read."""
    columns = _RIGHT - 24
    levels = _levels(view, part, columns)
    for start, end, level in _runs(levels):
        yield (
            f'<rect fill="{part.colour}" fill-opacity="{level / 4:g}" x="{24 + start}" '
            f'y="{y:.1f}" width="{end - start}" height="{_MAP_HEIGHT}"/>'
        )


def _levels(view: TraceView, part: _Shown, columns: int) -> list[int]:
    """For each pixel how much of it was read, in quarters, rounded up to what can be seen."""
    starts = _starts(view, part)
    width = max(part.size_bytes, 1) / columns
    read = [0.0] * columns
    for one in view.reads:
        if one.part not in starts:
            continue
        first, last = starts[one.part] + one.offset, starts[one.part] + one.offset + one.length
        for column in range(int(first / width), min(columns, math.ceil(last / width))):
            read[column] += min(last, (column + 1) * width) - max(first, column * width)
    return [max(3, min(4, math.ceil(4 * r / width))) if r > 0 else 0 for r in read]


def _starts(view: TraceView, part: _Shown) -> dict[int, int]:
    """Where each member begins if they lie end to end."""
    starts, at = {}, 0
    for number in part.members:
        starts[number] = at
        at += view.parts[number].size_bytes
    return starts


def _runs(levels: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    start = 0
    for column in range(1, len(levels) + 1):
        if column == len(levels) or levels[column] != levels[start]:
            if levels[start]:
                yield start, column, levels[start]
            start = column


# -- the table -------------------------------------------------------------------------------------


def table(view: TraceView, files: int) -> RenderableType:
    """Parts with what was read of each, and the files most read.

    Args:
        view: what to show.
        files: how many files at most.
    """
    from rich.console import Group  # here: only who looks needs it
    from rich.text import Text

    parts = _grid(["PART", "DATA", "SIZE", "READ", "%"], 2)
    for part in view.parts:
        digest = part.digest.removeprefix("sha256:")[:12]
        parts.add_row(*_cells(part.layer, digest), *_sizes(part.size_bytes, part.read_bytes))
    parts.add_row(Text("all", "bold"), "", *_sizes(view.total_bytes, view.read_bytes))
    if not (shown := view.files[: max(files, 0)]):
        return parts
    named = _grid(["FILE", "PART", "SIZE", "READ", "%"], 2)
    for file in shown:
        named.add_row(*_cells(file.path, file.layer), *_sizes(file.size_bytes, file.read_bytes))
    return Group(parts, Text(), named)


def _grid(columns: Sequence[str], texts: int) -> Table:
    """A table whose first columns are text, and numbers after that."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        if number < texts:
            grid.add_column(column, overflow="fold")
        else:
            grid.add_column(column, justify="right", no_wrap=True)
    return grid


def _cells(*texts: str) -> list[Text]:
    """Foreign text: nothing in it is markup, or acts on a terminal."""
    from rich.text import Text

    return [Text(clean(text)) for text in texts]


def _sizes(size_bytes: int, read_bytes: int) -> tuple[str, str, str]:
    return format_size(size_bytes), format_size(read_bytes), _percent(read_bytes, size_bytes)
