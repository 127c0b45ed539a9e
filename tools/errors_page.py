"""Write docs/reference/errors.md from the error table."""

from __future__ import annotations

from pathlib import Path

from dsec.base.errors import DsecError

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "errors.md"
HEAD = """# Errors

Made by `./dev gen` from `src/dsec/base/errors.py`; one table for REST, the SDK, the CLI and the edge. The branch says what you can
do. *Retryable*: the same request, with the same idempotency key or command id, may simply be sent again (the SDK does).

| class | code | HTTP | CLI exit | retryable | meaning |
|---|---|---|---|---|---|
"""


def rows(cls: type[DsecError], depth: int = 0) -> list[str]:
    """A class and those below it, as table rows."""
    indent = "&nbsp;" * 4 * depth
    meaning = " ".join((cls.__doc__ or "").split())
    row = (
        f"| {indent}`{cls.__name__}` | `{cls.code}` | {cls.http_status} | {cls.exit_status} "
        f"| {'yes' if cls.retryable else ''} | {meaning} |"
    )
    below = [sub for sub in cls.__subclasses__() if sub.__module__ == cls.__module__]
    return [row, *(line for sub in below for line in rows(sub, depth + 1))]


def render() -> str:
    """The whole page."""
    return HEAD + "\n".join(rows(DsecError)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
