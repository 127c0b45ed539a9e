"""Control groups v2 with all controllers, which this host may not have: in a guest that has no others.

Each test in the guest is one here, by its own name; all of them have run by the time the first is asked.
"""

from __future__ import annotations

import importlib

import pytest

from tests.vm.conftest import SUITES
from tests.vm.guest import Run

pytestmark = [pytest.mark.needs_root, pytest.mark.vm, pytest.mark.slow]
CONSOLE_LINES = 60


def inner_tests() -> list[str]:
    """Node ids of what is to run in the guest."""
    return [
        f"{suite.replace('.', '/')}.py::{name}"
        for suite in SUITES
        for name in vars(importlib.import_module(suite))
        if name.startswith("test_")
    ]


def end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-CONSOLE_LINES:])


def test_the_guest_runs_to_its_end(unified: Run) -> None:
    assert not unified.ended, f"{unified.ended}; its console:\n{end_of(unified.console)}"
    assert not unified.errors, "\n".join(unified.errors)


@pytest.mark.parametrize("test", inner_tests())
def test_in_the_guest(unified: Run, test: str) -> None:
    ran = [
        result
        for name, result in unified.tests.items()
        if name == test or name.startswith(f"{test}[")
    ]
    assert ran, f"it did not run; the console:\n{end_of(unified.console)}"
    assert [result.outcome for result in ran if result.outcome == "failed"] == [], "\n".join(
        result.text for result in ran
    )
    assert all(result.outcome == "passed" for result in ran), "it was skipped"
