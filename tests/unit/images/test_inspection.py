"""That one who asks for much work does not keep the node from the rest."""

from __future__ import annotations

from typing import Any, cast

import anyio
import pytest

from dsec.base.clock import SystemClock
from dsec.base.errors import NotFound, RateLimited
from dsec.images.inspection import Inspection
from dsec.images.records import Environment
from dsec.images.traces import Trace
from dsec.images.turns import MAX_WAITING
from dsec.wire.filler import Recording
from dsec.wire.public_v1 import EnvironmentRef, ImageView, LintRequest

pytestmark = pytest.mark.anyio

IMAGE = ImageView(name="i", digest="d", layers=[])
RECORDING = Recording(recording="r", digests=[], chunk_bytes=4096, started_at=0.0, spans=[])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Slow:
    """Environments whose layers take for ever to come, and then are not there."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.released: list[str] = []
        self.come = anyio.Event()

    async def compose(self, _wanted: EnvironmentRef) -> Environment:
        return Environment(image=IMAGE)

    async def hold(self, _environment: Environment, owner: str) -> None:
        self.held.append(owner)
        await self.come.wait()
        raise NotFound("no layer", kind="layer")

    async def release(self, owner: str) -> None:
        self.released.append(owner)


class Recorded:
    async def exact(self, _environment: Environment, name: str) -> Trace | None:
        return Trace(environment=[], name=name, recorded_at=0.0, recording=RECORDING)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def inspection(slow: Slow) -> Inspection:
    fakes: list[Any] = [slow, None, None, Recorded()]
    return Inspection(*cast("tuple[Any, Any, Any, Any]", tuple(fakes)), SystemClock())


async def lint(inspection: Inspection, refusals: list[Exception]) -> None:
    try:
        await inspection.lint(LintRequest(image="i"))
    except (NotFound, RateLimited) as error:
        refusals.append(error)


async def trace(inspection: Inspection, refusals: list[Exception]) -> None:
    try:
        await inspection.trace(EnvironmentRef(image="i"), "")
    except (NotFound, RateLimited) as error:
        refusals.append(error)


@pytest.mark.parametrize("ask", [lint, trace])
async def test_one_at_a_time_some_wait_more_are_refused(
    ask: Any, inspection: Inspection, slow: Slow
) -> None:
    refusals: list[Exception] = []
    async with anyio.create_task_group() as group:
        for _ in range(1 + MAX_WAITING + 2):
            group.start_soon(ask, inspection, refusals)
        await anyio.wait_all_tasks_blocked()
        assert len(slow.held) == 1
        assert [type(error) for error in refusals] == [RateLimited] * 2
        slow.come.set()
    assert len(refusals) == 1 + MAX_WAITING + 2
    assert len(slow.held) == 1 + MAX_WAITING
    assert sorted(slow.held) == sorted(slow.released)


async def test_lints_and_traces_do_not_wait_for_each_other(
    inspection: Inspection, slow: Slow
) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lint, inspection, [])
        group.start_soon(trace, inspection, [])
        await anyio.wait_all_tasks_blocked()
        assert sorted(owner.split("-")[0] for owner in slow.held) == ["lint", "trace"]
        slow.come.set()
