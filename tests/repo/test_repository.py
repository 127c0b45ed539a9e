"""The repository keeps its own promises: names, sizes, links, numbers with proofs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "dsec").rglob("*.py"))
MARKDOWN = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "spec").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]
FORBIDDEN_MODULES = {"utils", "helpers", "common", "misc", "manager", "core"}
MAX_LINES = 600


def tracked() -> list[Path]:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.fail("the repository tests need git and a checkout")
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"],
        check=True,
        capture_output=True,
    ).stdout.split(b"\0")
    return [ROOT / name.decode() for name in names if name and (ROOT / name.decode()).is_file()]


def test_module_names_say_what_is_inside() -> None:
    bad = [p for p in SOURCES if p.stem in FORBIDDEN_MODULES]
    assert bad == []


def test_every_module_begins_with_what_it_is() -> None:
    bad = [
        str(p.relative_to(ROOT))
        for p in SOURCES
        if p.stat().st_size and not p.read_text().lstrip().startswith(('"""', "#"))
    ]
    assert bad == []


def test_no_source_file_is_one_to_get_lost_in() -> None:
    generated = ROOT / "src" / "dsec" / "sdk" / "_sync"
    rust = sorted((ROOT / "native").glob("*/src/**/*.rs"))
    long = {
        str(p.relative_to(ROOT)): lines
        for p in [*SOURCES, *rust]
        if generated not in p.parents and (lines := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_links_between_documents_lead_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in MARKDOWN
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert dead == []


def test_paths_named_in_documents_exist() -> None:
    pattern = re.compile(r"`((?:src|native|spec|tests|docs|examples|bench|tools)/[\w./-]*\w)`")
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in MARKDOWN
        for path in pattern.findall(page.read_text())
        if not (ROOT / path).exists()
    ]
    assert missing == []


def test_each_promised_number_names_a_proof_that_exists() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in (ROOT / "SPECIFICATION.md").read_text().splitlines()
        if line.startswith("|") and not set(line) <= set("|-: ")
    ]
    promises = [row for row in rows if row[0] != "promise"]
    assert promises
    for row in promises:
        proof = row[-1]
        if proof.startswith("unproved"):
            continue
        names = re.findall(r"`([^`]+)`", proof)
        assert names, f"no proof named: {row}"
        for name in names:
            if bench := re.fullmatch(r"\./dev bench (\w+)", name):
                assert (ROOT / "bench" / f"{bench[1]}.py").exists(), row
            else:
                path, _, test = name.partition("::")
                assert (ROOT / path).exists(), row
                assert not test or test in (ROOT / path).read_text(), row


def test_the_repository_stands_alone() -> None:
    # Spelled backwards, or this file would be the first finding.
    backwards = (
        "/krow/ /mraf/ yrarbil. pots-erofeb gro.naibed.bed gro.ipyp detsohnohtyp.selif "
        "sjmpn.yrtsiger oi.setarc.citats oi.setarc.xedni gro.gnalog.yxorp gro.gnalog.mus"
    )
    words = re.compile("|".join(re.escape(word[::-1]) for word in backwards.split()))
    found = []
    for path in tracked():
        if path.name in {"Cargo.lock", "requirements.lock"}:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if words.search(line)
        ]
    assert found == []


def test_decisions_are_half_a_page() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert records
    for record in records:
        assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", record.name), record.name
        assert len(record.read_text().splitlines()) <= 60, record.name


def test_the_verbs_of_the_read_me_exist() -> None:
    verbs = set(re.findall(r"^  (\w+)\)", (ROOT / "dev").read_text(), re.MULTILINE))
    named = set(re.findall(r"\./dev (\w+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named
    assert named <= verbs


def test_the_page_of_errors_is_fresh() -> None:
    from tools.errors_page import PAGE, render

    assert PAGE.read_text() == render(), "run ./dev gen"
