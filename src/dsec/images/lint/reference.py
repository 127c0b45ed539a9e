"""The documentation's table of rules; `./dev gen` writes it."""

from __future__ import annotations

from dsec.images.lint.engine import ALL_RULES

_HEAD = """\
# Rules of the environment linter

Made by `./dev gen` from `src/dsec/images/lint/rules`; a test compares them. An *error* spoils an evaluation, a *warning*
probably does, *advice* only costs. What is not looked for: [the how-to](../howto/lint.md).

| rule | severity | when | why | advice |
|---|---|---|---|---|
"""


def reference() -> str:
    """The page."""
    rows = (
        f"| `{r.id}` | {r.severity} | {_cell(r.what)} | {_cell(r.why)} | {_cell(r.advice)} |\n"
        for r in ALL_RULES
    )
    return _HEAD + "".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
