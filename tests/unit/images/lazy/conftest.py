"""The filler under Trio with a clock that jumps, and on asyncio with real threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio.testing

THREADED = ("fetching", "reading", "recording", "filler", "budget", "shelf")


def _jumping(monkeypatch: pytest.MonkeyPatch) -> Any:
    # The jumping clock does not see threads at work and would jump over every deadline meanwhile.
    async def at_once(_purpose: str, func: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return func(*args)

    for module in THREADED:
        monkeypatch.setattr(f"dsec.images.lazy.{module}.in_thread", at_once)
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    return _jumping(monkeypatch)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return _jumping(monkeypatch) if request.param == "trio" else "asyncio"
