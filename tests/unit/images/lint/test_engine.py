from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dsec.base.errors import InvalidRequest
from dsec.images.lint.engine import MAX_FINDINGS, MAX_PER_RULE, lint
from dsec.images.lint.environment import Surroundings
from dsec.images.lint.patterns import TooSlow
from dsec.wire.public_v1 import LintRequest, LintRule
from tests.unit.images.lint.build import KEY, Sketch, debian, environment, found, report


def asked(*rules: LintRule, disabled: tuple[str, ...] = ()) -> LintRequest:
    return LintRequest(image="i", workspace="w", rules=list(rules), disabled=list(disabled))


def test_the_worst_come_first() -> None:
    image = debian()
    image.file("/z/id", KEY)
    image.file("/a/solution")
    image.file("/etc/passwd", b"root:x:0:0::/root:/bin/sh\n")
    findings = report(environment(image)).findings
    assert [f.severity for f in findings] == ["error", "warning", "warning", "advice"]
    assert findings[0].advice
    assert findings[0].layer == "image"


def test_the_report_says_what_was_looked_at() -> None:
    said = report(environment(debian(), Sketch("workspace w")), asked(disabled=("git-remote",)))
    assert (said.environment.image, said.environment.workspace) == ("i", "w")
    assert said.layers == 2
    assert said.entries > 20
    assert "git-remote" not in said.rules
    assert "git-future-refs" in said.rules
    assert not said.truncated


def test_layers_before_they_were_merged() -> None:
    env = environment(debian(), around=Surroundings(layers=21))
    assert report(env).layers == 21
    assert [rule for rule, _ in found(env)] == ["layers-many"]


def test_disabled_rules_find_nothing() -> None:
    image = debian()
    image.file("/z/id", KEY)
    assert found(environment(image), asked(disabled=("secret-private-key",))) == []
    with pytest.raises(InvalidRequest, match="no rule nonesuch"):
        report(environment(image), asked(disabled=("nonesuch",)))


def test_findings_are_bounded_for_each_rule_and_in_all() -> None:
    image = debian()
    for number in range(MAX_PER_RULE + 1):
        image.file(f"/app/{number}.patch")
    image.file("/z/id", KEY)
    said = report(environment(image))
    assert said.truncated
    assert len(said.findings) == MAX_PER_RULE + 1
    rules = [LintRule(id=f"r{n}", message="m", path="/app/*") for n in range(8)]
    said = report(environment(image), asked(*rules))
    assert said.truncated
    assert len(said.findings) == MAX_FINDINGS
    assert said.findings[0].rule == "secret-private-key"


def test_names_are_escaped() -> None:
    image = debian()
    image.file(b"/app/\xff\x1b[31m\xe2\x80\xae.patch")
    (finding,) = report(environment(image)).findings
    assert finding.path == r"/app/\xff\x1b[31m\u202e.patch"


def test_content_is_read_within_a_budget_and_that_is_told() -> None:
    image = debian()
    image.file("/z/id", KEY)
    image.file("/a/large", bytes(5000))
    assert ("lint-incomplete", "") in found(environment(image, budget_bytes=4000))
    assert "lint-incomplete" not in dict(found(environment(image, budget_bytes=10_000)))


def test_at_most_a_mebibyte_of_a_file_is_searched() -> None:
    image = debian()
    image.file("/in", bytes((1 << 20) - len(KEY)) + KEY)
    image.file("/out", bytes(1 << 20) + KEY)
    assert found(environment(image)) == [("secret-private-key", "/in")]


def test_own_rules() -> None:
    image = debian()
    image.file("/app/a.ipynb", b'{\n"outputs": [1]}')
    image.file("/app/b.ipynb", b'{"outputs": []}')
    rules = (
        LintRule(id="no-outputs", message="outputs", path="**/*.ipynb", content=r'"outputs": \[\d'),
        LintRule(id="no-app", severity="error", message="an app", path="/app", advice="none"),
    )
    findings = report(environment(image), asked(*rules)).findings
    assert [(f.rule, f.severity, f.message, f.path, f.advice) for f in findings] == [
        ("no-app", "error", "an app", "/app", "none"),
        ("no-outputs", "warning", "outputs (line 2)", "/app/a.ipynb", ""),
    ]
    assert found(environment(image), asked(*rules, disabled=("no-app", "no-outputs"))) == []


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (
            LintRule(id="a", message="m", content="("),
            "rule a: its content is no regular expression",
        ),
        (LintRule(id="a", message="m", content="x" * 1001), "longer than 1000"),
        (LintRule(id="a", message="m", path="x" * 1001), "longer than 1000"),
        (LintRule(id="git-remote", message="m"), "there is a rule git-remote already"),
    ],
)
def test_bad_rules_are_refused(rule: LintRule, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        report(environment(debian()), asked(rule))


def test_an_own_rule_that_is_too_slow_is_given_up_and_told() -> None:
    searches = 0

    @contextmanager
    def impatient() -> Iterator[None]:
        nonlocal searches
        searches += 1
        yield
        raise TooSlow

    rule = LintRule(id="slow", message="m", content="x")
    said = lint(environment(debian()), asked(rule), impatient)
    assert [f.rule for f in said.findings] == ["lint-rule-too-slow"]
    assert searches == 1


def test_what_cannot_be_read_ends_it() -> None:
    env = environment(debian())
    env._read = _broken
    with pytest.raises(OSError, match="gone"):
        report(env)


def _broken(*_: object) -> bytes:
    raise OSError("gone")
