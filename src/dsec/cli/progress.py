"""How far long work is: bars on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from dsec.base.errors import Unavailable
from dsec.cli.output import clean, note
from dsec.sdk import ProgressStream
from dsec.wire.public_v1 import ImageProgress

R = TypeVar("R", bound=msgspec.Struct)


class _Shown(Protocol):
    def __call__(self, progress: ImageProgress) -> None: ...


async def follow(events: ProgressStream[R]) -> R:
    """Show the progress of work on standard error; what it made.

    Raises:
        Unavailable: it ended without anything.
    """
    ready: R | None = None
    with _bars() if sys.stderr.isatty() else _lines() as show:
        async with events:
            async for event in events:
                if isinstance(event, ImageProgress):
                    show(event)
                else:
                    ready = event
    if ready is None:
        raise Unavailable("the work ended without a result")
    return ready


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal that something is being waited for."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # here: only a terminal needs it
    from rich.markup import escape

    with Console(stderr=True).status(escape(clean(what))):
        yield


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show on a terminal how many of `total` are done; call what it gives for each."""
    if not sys.stderr.isatty() or total < 2:
        with waiting(what):
            yield lambda: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(escape(clean(what)), total=total)
        yield lambda: bars.advance(task)


@contextmanager
def _lines() -> Iterator[_Shown]:
    last = ""

    def show(progress: ImageProgress) -> None:
        nonlocal last
        if progress.step != last:
            last = progress.step
            note(progress.step)

    yield show


@contextmanager
def _bars() -> Iterator[_Shown]:
    from rich.console import Console  # here: only a terminal needs it
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(progress: ImageProgress) -> None:
            total = progress.total or None
            if progress.step not in tasks:
                tasks[progress.step] = bars.add_task(escape(clean(progress.step)), total=total)
            bars.update(tasks[progress.step], completed=progress.done, total=total)

        yield show
