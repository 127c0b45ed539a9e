"""What a rule is, and what a family of rules gives the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsec.images.lint.environment import Environment
from dsec.images.overlaid import Entry
from dsec.wire.public_v1 import Severity


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong. The documentation's table is made of these."""

    id: str
    severity: Severity
    what: str
    """When it is found."""
    why: str
    advice: str

    def at(self, message: str, entry: Entry | None = None) -> Found:
        """A finding of this rule, at an entry or of the environment as a whole."""
        if entry is None:
            return Found(self, message)
        return Found(self, message, entry.path, entry.part)

    def of(self, message: str, path: bytes, part: int) -> Found:
        """A finding at a path that may not be seen from above."""
        return Found(self, message, path, part)


@dataclass(frozen=True, slots=True)
class Found:
    """A finding before it is written for the report."""

    rule: Rule
    message: str
    path: bytes = b""
    part: int | None = None


Look = Callable[[Environment], Iterator[Found]]
"""Looks at names and attributes, and reads what it must."""

Scan = Callable[[Entry, bytes], Iterator[Found]]
"""Looks at the beginning of one regular file, at most `MAX_TEXT_BYTES`."""


@dataclass(frozen=True, slots=True)
class Family:
    """Rules that look at the same things."""

    name: str
    rules: tuple[Rule, ...]
    look: Look | None = None
    scan: Callable[[Environment], Scan | None] | None = None
    """Makes what is called for every file's content; None if there is nothing to look for."""
