"""The caller's own patterns: globs over paths, regular expressions over content, kept in bounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

from dsec.base.errors import InvalidRequest

MAX_PATTERN = 1000
Guard = Callable[[], AbstractContextManager[object]]
"""Around one search; its `TooSlow` ends a search that takes too long."""


class TooSlow(Exception):
    """A search of one of the caller's patterns took too long."""


def unguarded() -> AbstractContextManager[object]:
    """Let a search take as long as it takes."""
    return nullcontext()


def content_pattern(text: str, rule: str) -> re.Pattern[bytes]:
    """Compile a rule's regular expression.

    Raises:
        InvalidRequest: it is none, or too long.
    """
    if len(text) > MAX_PATTERN:
        raise InvalidRequest(f"rule {rule}: its content is longer than {MAX_PATTERN} characters")
    try:
        return re.compile(text.encode("utf-8", "surrogatepass"))
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidRequest(
            f"rule {rule}: its content is no regular expression: {error}"
        ) from error


def glob_matcher(glob: str, rule: str) -> Callable[[bytes], bool]:
    """What tells whether an absolute path matches: `*`, `?` within a name, `**` across them.

    Matches in time bounded by the product of both lengths, whatever the glob.

    Raises:
        InvalidRequest: it is too long.
    """
    if len(glob) > MAX_PATTERN:
        raise InvalidRequest(f"rule {rule}: its path is longer than {MAX_PATTERN} characters")
    pattern = glob if glob.startswith(("/", "**")) else f"/{glob}"
    names = [n.encode("utf-8", "surrogatepass") for n in pattern.strip("/").split("/")]
    return lambda path: _components_match(tuple(names), path.strip(b"/").split(b"/"))


def _components_match(globs: tuple[bytes, ...], names: list[bytes]) -> bool:
    """Whether the globs match all the names: the set of globs that may come next is kept."""
    at = _skipped({0}, globs)
    for name in names:
        at = _skipped(set(_after(at, globs, name)), globs)
    return len(globs) in at


def _after(at: set[int], globs: tuple[bytes, ...], name: bytes) -> Iterator[int]:
    for index in at:
        if index == len(globs):
            continue
        if globs[index] == b"**":
            yield index
        elif _name_matches(globs[index], name):
            yield index + 1


def _skipped(at: set[int], globs: tuple[bytes, ...]) -> set[int]:
    """Also the places after each `**`, which may match nothing."""
    found = set(at)
    for index, glob in enumerate(globs):
        if index in found and glob == b"**":
            found.add(index + 1)
    return found


@lru_cache(maxsize=4096)
def _name_matches(glob: bytes, name: bytes) -> bool:
    """Whether a name matches `*` and `?`: back only to the last `*`, so never exponential."""
    at = star = 0
    resume = -1
    index = 0
    while index < len(name):
        if at < len(glob) and glob[at] == 0x2A:
            star, resume, at = at, index, at + 1
        elif at < len(glob) and glob[at] in (0x3F, name[index]):
            at, index = at + 1, index + 1
        elif resume >= 0:
            resume += 1
            at, index = star + 1, resume
        else:
            return False
    return not glob[at:].strip(b"*")
