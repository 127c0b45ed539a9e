"""An edge that is killed at a journal write: in one process, and with no thread to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from dsec.base.errors import Unavailable


class Killed(BaseException):
    """The edge ends here; no clean-up runs, since none of it catches this."""


def only_killed(exc: BaseException) -> bool:
    """Whether nothing else ended it."""
    if isinstance(exc, BaseExceptionGroup):
        return all(only_killed(inner) for inner in exc.exceptions)
    # Unavailable: what a caller who waits for a stop hears of an edge that goes down under it.
    return isinstance(exc, Killed | Unavailable | anyio.get_cancelled_exc_class())


def without_threads(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Have these modules of the edge do their blocking work where they are."""

    async def at_once(_purpose: str, func: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return func(*args)

    for module in modules:
        monkeypatch.setattr(f"dsec.edge.{module}.in_thread", at_once)
