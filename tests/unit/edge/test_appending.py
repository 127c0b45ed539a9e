"""Writes that go to threads: all of a batch are written, or say that they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from dsec.base.clock import SystemClock
from dsec.edge import appending
from dsec.edge.appending import SMALL_BYTES, Appender
from dsec.trajectory import writer
from dsec.trajectory.format import MAGIC


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_where_no_thread_can_be_started_nobody_takes_it_for_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = tmp_path / "t", b"x" * (SMALL_BYTES + 1)
    writer.create(path)
    appender, failures = Appender(SystemClock()), list[OSError]()
    starts = iter([True, False])

    async def started(_purpose: str, work: Callable[..., None], *args: object) -> None:
        await anyio.wait_all_tasks_blocked()
        if not next(starts, True):
            raise RuntimeError("can't start new thread")
        work(*args)

    async def add() -> None:
        try:
            await appender.append(path, data)
        except OSError as exc:
            failures.append(exc)

    monkeypatch.setattr(appending, "in_thread", started)
    async with anyio.create_task_group() as group:
        for _ in range(3):  # the first goes alone, the others together after it
            group.start_soon(add)
    assert [str(failure) for failure in failures] == ["[Errno 11] can't start new thread"] * 2
    assert path.stat().st_size == len(MAGIC) + len(data)
    assert await appender.append(path, data) == len(MAGIC) + len(data)
