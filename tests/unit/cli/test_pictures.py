"""What people are shown of traces and lint reports."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console, RenderableType

from dsec.cli import lint_report, trace_picture
from dsec.wire.public_v1 import (
    EnvironmentRef,
    LintFinding,
    LintReport,
    TraceFile,
    TracePart,
    TraceRead,
    TraceView,
)

HOSTILE = "a\x1b[31m\u202e<script>&\"'[bold]\uffff"
SVG = "{http://www.w3.org/2000/svg}"
MIB = 1 << 20


def text_of(what: RenderableType, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def view(reads: list[tuple[int, int, int, int]], parts: int = 2, name: str = "image") -> TraceView:
    shown = [
        TracePart(layer=f"{name} {n}", digest=f"sha256:{n:064x}", size_bytes=10 * MIB)
        for n in range(parts)
    ]
    for _, part, _, length in reads:
        shown[part].read_bytes += length
    return TraceView(
        environment=EnvironmentRef(image=name, toolkits=["kit:1"]),
        trace=name,
        recorded_at=1.7e9,
        parts=shown,
        reads=[TraceRead(*read) for read in reads],
        files=[TraceFile(path=f"/{name}", layer=name, size_bytes=4096, read_bytes=1024)],
        total_bytes=parts * 10 * MIB,
        read_bytes=sum(part.read_bytes for part in shown),
    )


READS = [(0, 0, 0, MIB), (500, 1, 5 * MIB, MIB), (1000, 0, 2 * MIB, 2 * MIB)]


def numbers(path: str) -> list[tuple[str, float]]:
    return [(kind, float(value)) for kind, value in re.findall(r"([MHV])(-?[\d.]+)", path)]


def total_line(picture: str) -> list[tuple[str, float]]:
    (line,) = (e for e in ET.fromstring(picture).iter(f"{SVG}path") if e.get("class") == "total")
    return numbers(line.attrib["d"])


def test_the_line_goes_up_at_each_read_to_its_share() -> None:
    line = total_line(trace_picture.svg(view(READS)))
    heights = [value for kind, value in line if kind == "V"]
    bottom = 96 + 280
    unit = (bottom - heights[-1]) / 4  # four MiB in all
    assert heights == pytest.approx([bottom - unit, bottom - 2 * unit, bottom - 4 * unit], abs=0.2)
    across = [value for kind, value in line if kind == "H"]
    assert across == sorted(across)
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=2)


def test_one_area_for_each_part_that_was_read() -> None:
    root = ET.fromstring(trace_picture.svg(view(READS, parts=3)))
    areas = [e for e in root.iter(f"{SVG}path") if e.get("class") is None]
    assert len({area.get("fill") for area in areas}) == len(areas) == 2


def marks(picture: str, colour: str) -> list[tuple[int, int]]:
    rects = (e.attrib for e in ET.fromstring(picture).iter(f"{SVG}rect"))
    return [
        (int(r["x"]), int(r["width"]))
        for r in rects
        if r.get("fill") == colour and "fill-opacity" in r
    ]


def test_the_map_shows_where_reads_fell() -> None:
    picture = trace_picture.svg(view(READS))
    found = marks(picture, trace_picture._COLOURS[1])
    assert found[0][0] == 24 + 456  # half way: 5 of 10 MiB
    assert sum(width for _, width in found) == pytest.approx(91.2, abs=1)
    first, second = marks(picture, trace_picture._COLOURS[0])[0], marks(picture, "#4c78a8")[-1]
    assert first[0] == 24
    assert second[0] + second[1] == pytest.approx(24 + 912 * 0.4, abs=1)


def test_names_are_text_in_the_picture() -> None:
    picture = trace_picture.svg(view(READS, name=HOSTILE))
    root = ET.fromstring(picture)
    assert not list(root.iter(f"{SVG}script"))
    assert "\x1b" not in picture
    assert "\u202e" not in picture
    assert "\uffff" not in picture
    assert any(r"a\x1b[31m" in (e.text or "") for e in root.iter(f"{SVG}text"))


def test_the_picture_needs_nothing_beside_it() -> None:
    picture = trace_picture.svg(view(READS))
    assert picture.startswith('<svg xmlns="http://www.w3.org/2000/svg" width="960"')
    assert not re.search(r"href|url\(|@import|<image", picture)
    assert "prefers-color-scheme:dark" in picture


def test_long_names_and_many_parts_and_reads_stay_within_bounds() -> None:
    reads = [(n, n % 40, (n * 7919) % (9 * MIB), 4096) for n in range(20_000)]
    picture = trace_picture.svg(view(reads, parts=40, name="x" * 500))
    assert len(picture) < 2 * MIB
    assert "28 others" in picture
    for text in ET.fromstring(picture).iter(f"{SVG}text"):
        assert len(text.text or "") < 160


@pytest.mark.parametrize("reads", [[], [(0, 0, 0, 1)], [(10**9, 0, 0, 10 * MIB)]])
def test_little_or_late_reads(reads: list[tuple[int, int, int, int]]) -> None:
    root = ET.fromstring(trace_picture.svg(view(reads)))
    said = [e.text for e in root.iter(f"{SVG}text")]
    assert ("nothing was read" in said) == (not reads)


def test_an_environment_without_data() -> None:
    empty = view([], parts=0)
    ET.fromstring(trace_picture.svg(empty))
    assert "0.0 %" in text_of(trace_picture.table(empty, 10))


def test_a_table_of_parts_and_files() -> None:
    said = text_of(trace_picture.table(view(READS), 10))
    assert re.search(r"image 0 +0{12} +10.0 MiB +3.0 MiB +30 %", said)
    assert re.search(r"all +20.0 MiB +4.0 MiB +20 %", said)
    assert re.search(r"/image +image +4.0 KiB +1.0 KiB +25 %", said)
    assert "/image" not in text_of(trace_picture.table(view(READS), 0))


def test_names_are_text_in_tables() -> None:
    said = text_of(trace_picture.table(view(READS, name=HOSTILE), 10))
    assert r"/a\x1b[31m\u202e<script>" in said
    assert "[bold]" in said


def report(*findings: LintFinding) -> LintReport:
    return LintReport(
        environment=EnvironmentRef(image="i"),
        findings=list(findings),
        entries=7,
        size_bytes=MIB,
        layers=2,
        truncated=bool(findings),
    )


def test_findings_are_text_and_advice_is_given_once() -> None:
    one = LintFinding(
        rule="r-one", severity="error", message=HOSTILE, path="/p", layer="image", advice="do it"
    )
    two = LintFinding(rule="r-two", severity="warning", message="m")
    said = text_of(lint_report.table(report(one, one, two)))
    assert r"a\x1b[31m\u202e<script>" in said
    assert "\x1b" not in said
    assert said.count("r-one: do it") == 1
    assert re.search(r"error +r-one +/p \(image\)", said)
    assert "2 errors, 1 warning, 0 pieces of advice in 7 entries, 1.0 MiB, 2 layers; there" in said


def test_nothing_found() -> None:
    said = text_of(lint_report.table(report()))
    assert said.strip() == (
        "0 errors, 0 warnings, 0 pieces of advice in 7 entries, 1.0 MiB, 2 layers"
    )
