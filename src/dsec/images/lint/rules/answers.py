"""Answers and tests of the task, by what files are named and what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsec.images.lint.environment import Environment
from dsec.images.lint.rule import Family, Found, Rule, Scan
from dsec.images.overlaid import Entry
from dsec.images.paths import shown

ANSWER = Rule(
    "answer-in-environment",
    "error",
    "A text that the request gives as an answer is in a file or its name, a file says which tests "
    "must pass, or a file is named as a reference solution or hidden test patch.",
    "An agent that finds it has solved nothing.",
    "Leave it out of the environment; bring what grading needs to it afterwards.",
)
LIKE_ANSWER = Rule(
    "answer-file-name",
    "warning",
    "A file where tasks keep theirs is named like an answer: solution, answer, expected_output, "
    "a patch or a diff.",
    "It may be the solution, or what the output is compared with.",
    "Look at it; remove it, or disable this rule for this environment.",
)

MIN_ANSWER_BYTES = 6
"""Shorter texts are found everywhere by chance."""
_SHOWN_ANSWER = 40
_SURE = re.compile(
    rb"(gold(en)?[-_](patch|solution|answer)|(reference|hidden|oracle)[-_](solution|tests?|answer)"
    rb"|test[-_]patch|model[-_]patch|(fail|pass)_to_pass)s?([-_.].*)?",
    re.IGNORECASE,
)
_LIKELY = re.compile(
    rb"(solutions?|answers?|answer[-_]key|gold(en)?|expected[-_]outputs?)([-_.][^/]*)?"
    rb"|[^/]+\.(patch|diff)",
    re.IGNORECASE,
)
_METADATA = re.compile(rb"""["']?\b(FAIL_TO_PASS|PASS_TO_PASS)\b["']?\s*[:=]""")
_SYSTEM = re.compile(
    rb"/(usr|lib|lib32|lib64|bin|sbin|etc|var|boot|proc|sys|dev|run|nix|snap)(/|$)"
    rb"|/(site-packages|dist-packages|node_modules|\.git|\.cargo|\.rustup|pkgs|debian/patches"
    rb"|go/pkg/mod|conda-meta)/"
)


def look(env: Environment) -> Iterator[Found]:
    """Judge names."""
    texts = _texts(env)
    for path, entry in env.entries.items():
        name = entry.name
        if said := next((text for text in texts if text in path), None):
            yield ANSWER.at(f"the name holds {_quoted(said)}", entry)
        elif _SYSTEM.match(path) or _SYSTEM.search(path):
            continue
        elif _SURE.fullmatch(name):
            yield ANSWER.at("it is named as what grades the task", entry)
        elif _LIKELY.fullmatch(name):
            yield LIKE_ANSWER.at("it is named like an answer", entry)


def scan(env: Environment) -> Scan:
    """Judge what files say, those of packages included: a fixed version may be installed."""
    texts = _texts(env)

    def judge(entry: Entry, content: bytes) -> Iterator[Found]:
        for text in texts:
            if (at := content.find(text)) >= 0:
                line = content.count(b"\n", 0, at) + 1
                yield ANSWER.at(f"line {line} holds {_quoted(text)}", entry)
        if b"_TO_PASS" in content and (match := _METADATA.search(content)):
            yield ANSWER.at(f"it says which tests must pass: {match[1].decode()}", entry)

    return judge


def _texts(env: Environment) -> list[bytes]:
    texts = (text.strip().encode("utf-8", "surrogatepass") for text in env.around.answers)
    return [text for text in dict.fromkeys(texts) if len(text) >= MIN_ANSWER_BYTES]


def _quoted(text: bytes) -> str:
    cut = text if len(text) <= _SHOWN_ANSWER else text[:_SHOWN_ANSWER] + b"..."
    return f"the answer “{shown(cut)}”"


FAMILY = Family("answers", (ANSWER, LIKE_ANSWER), look, scan)
