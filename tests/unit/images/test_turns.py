from __future__ import annotations

import anyio
import pytest

from dsec.base.errors import RateLimited
from dsec.images.turns import MAX_WAITING, Turns

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Workers:
    """Tasks that want a turn, and hold it until told to go on."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.at_work: list[int] = []
        self.refused: list[int] = []
        self.go = anyio.Event()

    async def work(self, number: int) -> None:
        try:
            async with self._turns.turn():
                self.at_work.append(number)
                await self.go.wait()
                self.at_work.remove(number)
                await anyio.lowlevel.checkpoint()
        except RateLimited as error:
            assert error.details["retry_after_s"]
            self.refused.append(number)


async def test_one_at_a_time_and_a_few_wait() -> None:
    turns = Turns("testing")
    workers = Workers(turns)
    async with anyio.create_task_group() as group:
        for number in range(MAX_WAITING + 3):
            group.start_soon(workers.work, number)
        await anyio.wait_all_tasks_blocked()
        assert len(workers.at_work) == 1
        assert len(workers.refused) == 2
        workers.go.set()
    assert workers.at_work == []
    async with turns.turn():
        pass


async def test_who_waits_too_long_is_told_to_come_back() -> None:
    turns = Turns("testing", patience_s=0.01)
    workers = Workers(turns)
    async with anyio.create_task_group() as group, turns.turn():
        group.start_soon(workers.work, 1)
        while not workers.refused:
            await anyio.lowlevel.checkpoint()
    assert workers.refused == [1]


async def test_a_cancelled_one_gives_its_turn_on() -> None:
    turns = Turns("testing")
    workers = Workers(turns)
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            async with turns.turn():
                group.start_soon(workers.work, 1)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert workers.at_work == [1]
        workers.go.set()
