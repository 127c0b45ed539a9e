"""What the container backend does about control groups that do not obey."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec.base.errors import InternalError
from dsec.edge.backends import container
from dsec.edge.backends.container import ContainerBackend, ContainerConfig
from dsec.linux.cgroup import groups
from tests.unit.edge.node import AnyClock, FakeImages


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerBackend:
    monkeypatch.setattr(container, "KILL_PATIENCE_S", 0.3)
    monkeypatch.setattr(container, "KILL_PAUSE_S", 0.01)
    config = ContainerConfig(node="n0de", state=tmp_path, aether=tmp_path / "aether")
    return ContainerBackend(config, FakeImages(), AnyClock())


def hang(monkeypatch: pytest.MonkeyPatch, *hanging: str) -> list[str]:
    """Processes of these sandboxes hang in the kernel; returns whose groups get removed."""
    removed: list[str] = []

    def kill(_layout: Any, sandbox: str) -> None:
        if sandbox in hanging:
            raise TimeoutError(f"processes [1] of {sandbox} did not end")

    def remove(_layout: Any, sandbox: str) -> None:
        removed.append(sandbox)

    monkeypatch.setattr(groups, "kill", kill)
    monkeypatch.setattr(groups, "remove", remove)
    monkeypatch.setattr(groups, "sandboxes", lambda _layout: ["a", "b", "c", "known"])
    return removed


async def test_a_stray_that_stays_keeps_no_other(
    backend: ContainerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = hang(monkeypatch, "a")
    assert len(await backend.strays(frozenset({"known"}))) == 2
    assert removed == ["b", "c"]


async def test_many_that_hang_hold_up_no_kill(
    backend: ContainerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang(monkeypatch, *(f"h{number}" for number in range(50)))
    failed = []

    async def kill(sandbox: str) -> None:
        try:
            await backend._kill(sandbox)
        except InternalError:
            failed.append(sandbox)

    async with anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(kill, f"h{number}")
        with anyio.fail_after(0.25):
            await backend._kill("fine")
    assert len(failed) == 50
