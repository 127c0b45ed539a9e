"""Applies the rules: those of the house and the caller's own. Pure and synchronous."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsec.base.errors import InvalidRequest
from dsec.images.lint.environment import BudgetSpent, Environment
from dsec.images.lint.patterns import (
    Guard,
    TooSlow,
    content_pattern,
    glob_matcher,
    unguarded,
)
from dsec.images.lint.rule import Family, Found, Rule, Scan
from dsec.images.lint.rules import FAMILIES, RULES
from dsec.images.overlaid import Entry
from dsec.images.paths import printable, shown
from dsec.wire.public_v1 import EnvironmentRef, LintFinding, LintReport, LintRequest, LintRule

MAX_FINDINGS = 1000
MAX_PER_RULE = 200
"""So that one rule with much to say does not hide the others."""
_MAX_MESSAGE = 500

INCOMPLETE = Rule(
    "lint-incomplete",
    "warning",
    "The linter gave up before everything was looked at.",
    "What it did not see is not clean.",
    "Lint parts by themselves, or disable rules that read much.",
)
OWN_TOO_SLOW = Rule(
    "lint-rule-too-slow",
    "warning",
    "One of the caller's own rules has a regular expression that takes too long; it was given up.",
    "Files after that were not searched for it.",
    "Write it without a repetition inside of a repetition.",
)
ALL_RULES = (*RULES, INCOMPLETE, OWN_TOO_SLOW)
_RANK = {"error": 0, "warning": 1, "advice": 2}


@dataclass(slots=True)
class _Kept:
    """Findings so far, bounded for each rule."""

    findings: list[Found]
    counts: Counter[str]
    disabled: frozenset[str]

    def take(self, found: Iterator[Found]) -> None:
        for one in found:
            if one.rule.id in self.disabled:
                continue
            self.counts[one.rule.id] += 1
            if self.counts[one.rule.id] <= MAX_PER_RULE:
                self.findings.append(one)


def lint(env: Environment, request: LintRequest, guard: Guard = unguarded) -> LintReport:
    """Look an environment over.

    Args:
        env: with `around.answers` as the request has them.
        request: own rules, and the ids of those disabled.
        guard: put around each search of an own rule; may raise `TooSlow`.

    Raises:
        InvalidRequest: an own rule's pattern is bad, its id is taken, or an unknown id is disabled.
        DataUnavailable, OSError: content cannot be read.
    """
    own = _own_families(request, guard)
    families = [*FAMILIES, *own]
    known = {rule.id for rule in ALL_RULES} | {rule.id for rule in request.rules}
    _check_disabled(request.disabled, known)
    kept = _Kept([], Counter(), frozenset(request.disabled))
    active = [f for f in families if any(r.id not in kept.disabled for r in f.rules)]
    try:
        for family in active:
            if family.look is not None:
                kept.take(family.look(env))
        _scan(env, active, kept)
    except BudgetSpent:
        kept.take(iter([INCOMPLETE.at("there was more content than one run may read")]))
    return _report(env, request, kept, sorted(known - kept.disabled))


def _check_disabled(disabled: Sequence[str], known: set[str]) -> None:
    if unknown := sorted(set(disabled) - known):
        raise InvalidRequest(f"there is no rule {', '.join(unknown)[:200]} to disable")


def _scan(env: Environment, families: list[Family], kept: _Kept) -> None:
    """Read every file once, what packages own last: if content is too much, that is left out."""
    scans = [scan for f in families if f.scan is not None and (scan := f.scan(env)) is not None]
    files = {id(entry.inode): entry for entry in env.files() if entry.inode.size}
    for entry in sorted(files.values(), key=lambda entry: entry.path in env.packaged):
        content = env.content(entry)
        for scan in scans:
            kept.take(scan(entry, content))


def _own_families(request: LintRequest, guard: Guard) -> list[Family]:
    taken = {rule.id for rule in ALL_RULES}
    for own in request.rules:
        if own.id in taken:
            raise InvalidRequest(f"there is a rule {own.id} already")
        taken.add(own.id)
    return [_own_family(own, guard) for own in request.rules]


def _own_family(own: LintRule, guard: Guard) -> Family:
    rule = Rule(own.id, own.severity, own.message, "", own.advice)
    matches = glob_matcher(own.path, own.id)
    if own.content is None:

        def look(env: Environment) -> Iterator[Found]:
            return (rule.at(own.message, e) for e in env.entries.values() if matches(e.path))

        return Family(own.id, (rule,), look)
    pattern = content_pattern(own.content, own.id)
    given_up = False

    def judge(entry: Entry, content: bytes) -> Iterator[Found]:
        nonlocal given_up
        if given_up or not matches(entry.path):
            return
        try:
            with guard():
                found = pattern.search(content)
        except TooSlow:
            given_up = True
            yield OWN_TOO_SLOW.at(f"rule {own.id} was given up at this file", entry)
            return
        if found:
            line = content.count(b"\n", 0, found.start()) + 1
            yield rule.at(f"{own.message} (line {line})", entry)

    def scan(_env: Environment) -> Scan:
        return judge

    return Family(own.id, (rule,), None, scan)


def _report(env: Environment, request: LintRequest, kept: _Kept, rules: list[str]) -> LintReport:
    worst = heapq.nsmallest(MAX_FINDINGS, kept.findings, key=_order)
    inodes = {id(entry.inode): entry.inode.size for entry in env.files()}
    return LintReport(
        environment=EnvironmentRef(
            image=request.image, workspace=request.workspace, toolkits=request.toolkits
        ),
        findings=[_finding(env, found) for found in worst],
        entries=len(env.entries),
        size_bytes=sum(inodes.values()),
        layers=env.around.layers or len(env.parts),
        rules=rules,
        truncated=kept.counts.total() > len(worst),
    )


def _order(found: Found) -> tuple[int, str, bytes, str]:
    return _RANK[found.rule.severity], found.rule.id, found.path, found.message


def _finding(env: Environment, found: Found) -> LintFinding:
    return LintFinding(
        rule=found.rule.id,
        severity=found.rule.severity,
        message=printable(found.message)[:_MAX_MESSAGE],
        path=shown(found.path),
        layer="" if found.part is None else env.label(found.part),
        advice=found.rule.advice,
    )
