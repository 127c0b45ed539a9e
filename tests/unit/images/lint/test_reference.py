from __future__ import annotations

from pathlib import Path

from dsec.images.lint.engine import ALL_RULES
from dsec.images.lint.reference import reference

PAGE = Path(__file__).resolve().parents[4] / "docs/reference/lint-rules.md"


def test_the_page_is_made_of_the_rules() -> None:
    assert PAGE.read_text() == reference(), "./dev gen"


def test_ids_are_unique_and_all_is_said() -> None:
    assert len({rule.id for rule in ALL_RULES}) == len(ALL_RULES)
    for rule in ALL_RULES:
        assert rule.what.endswith("."), rule.id
        assert rule.why.endswith("."), rule.id
        assert rule.advice.endswith("."), rule.id
