"""Make the synchronous SDK from the asynchronous one: `python tools/unasync.py [--check]`.

Every file of `_async` becomes one of `_sync` by the substitutions below, token by token or phrase by
phrase, then by `ruff format`. A substitution nothing uses is an error: the list stays true.
"""

from __future__ import annotations

import re
import subprocess  # noqa: TID251 - a tool, not the product
import sys
from pathlib import Path

SDK = Path(__file__).resolve().parent.parent / "src/dsec/sdk"
SOURCE, TARGET = SDK / "_async", SDK / "_sync"
HEADER = "# Generated from ../_async by tools/unasync.py; do not edit.\n"

PHRASES = {
    "The asynchronous SDK, written by hand; `_sync` is generated from it by tools/unasync.py.": (
        "The synchronous SDK, generated from `_async` by tools/unasync.py."
    ),
    "AsyncIterable[bytes] | Iterable[bytes]": "Iterable[bytes]",
    "AsyncIterable() | Iterable()": "Iterable()",
    "AsyncIterable, AsyncIterator, Callable, Iterable, Iterator": "Callable, Iterable, Iterator",
    "from collections.abc import Awaitable\n": "",
    "Awaitable[ExecResult]": "ExecResult",
}
WORDS = {
    "async def": "def",
    "async for": "for",
    "async with": "with",
    "await ": "",
    "AsyncIterator": "Iterator",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "StopAsyncIteration": "StopIteration",
    "__anext__": "__next__",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclose": "close",
    "_aio": "_blocking",
    "_aiohttp": "_urllib3",
    "_async": "_sync",
}


def translate(text: str, used: set[str]) -> str:
    """One file."""
    for old, new in PHRASES.items():
        if old in text:
            used.add(old)
            text = text.replace(old, new)
    for old, new in WORDS.items():
        pattern = rf"(?<!\w){re.escape(old)}" + ("" if old.endswith(" ") else r"(?!\w)")
        text, count = re.subn(pattern, new, text)
        if count:
            used.add(old)
    return HEADER + text


def generate() -> dict[str, str]:
    """Every file of `_sync`, by name.

    Raises:
        SystemExit: a substitution is not used.
    """
    used: set[str] = set()
    files = {path.name: translate(path.read_text(), used) for path in sorted(SOURCE.glob("*.py"))}
    unused = [old for old in (*PHRASES, *WORDS) if old not in used]
    if unused:
        raise SystemExit(f"substitutions nothing uses: {unused}")
    return {name: _format(text) for name, text in files.items()}


def _format(text: str) -> str:
    for arguments in (["check", "--select", "I", "--fix-only", "--quiet"], ["format"]):
        done = subprocess.run(  # noqa: S603 - a fixed command
            [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", "x.py", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=SDK,
        )
        text = done.stdout
    return text


def main(arguments: list[str]) -> int:
    """Write the files, or with --check say whether they are as they would be written."""
    wanted = generate()
    have = {path.name: path.read_text() for path in TARGET.glob("*.py")}
    if "--check" in arguments:
        stale = sorted(name for name in wanted | have if wanted.get(name) != have.get(name))
        if stale:
            sys.stderr.write(f"not as generated: {', '.join(stale)}; run tools/unasync.py\n")
        return 1 if stale else 0
    TARGET.mkdir(exist_ok=True)
    for name in have.keys() - wanted.keys():
        (TARGET / name).unlink()
    for name, text in wanted.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
