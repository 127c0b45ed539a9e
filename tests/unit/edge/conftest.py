"""The edge on both event loops, under Trio with a clock that jumps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from tests.unit.edge.node import Node


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "trio":
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return "asyncio"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    # The jumping clock does not see threads at work and would jump over every deadline meanwhile.
    async def at_once(_purpose: str, func: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return func(*args)

    for module in (
        "service",
        "changing",
        "entering",
        "lifecycle.owner",
        "sweep",
        "recording",
        "resizing",
        "appending",
        "retelling",
        "shipping",
    ):
        monkeypatch.setattr(f"dsec.edge.{module}.in_thread", at_once)
    return Node(tmp_path)
