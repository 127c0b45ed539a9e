from __future__ import annotations

import anyio
import pytest
import trio.testing

from dsec.base.states import StopReason
from dsec.edge.ttl import SLACK, AskCommands, Later, Stop, Times, Ttl, judge
from tests.unit.edge.node import AnyClock

JUMPING = [
    pytest.param(("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}), id="trio")
]


def times(
    now: float, idle: float | None = 0.0, ttl: float | None = 100.0, dies: float | None = 1000.0
) -> Times:
    return Times(now=now, idle_since=idle, idle_ttl_s=ttl, dies_at=dies)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (times(10), Later(100.0)),
        (times(100), AskCommands()),
        (times(500, idle=None), Later(600.0)),
        (times(950, idle=None), Later(1000.0)),
        (times(1000, idle=None), Stop(StopReason.LIFETIME)),
        (times(1000), Stop(StopReason.LIFETIME)),
        (times(5000, ttl=None, dies=None), Later(None)),
        (times(5000, ttl=None, dies=6000.0), Later(6000.0)),
    ],
)
def test_verdicts(facts: Times, verdict: object) -> None:
    assert judge(facts) == verdict


async def test_one_heap_looks_at_each_in_its_time() -> None:
    clock, begun, looks = AnyClock(), anyio.current_time(), list[tuple[str, float]]()

    async def look(sandbox: str) -> float | None:
        looks.append((sandbox, round(clock.monotonic() - begun, 2)))
        return clock.monotonic() + 0.03 if sandbox == "a" and len(looks) < 3 else None

    ttl = Ttl(clock, look)
    async with anyio.create_task_group() as group:
        group.start_soon(ttl.run)
        ttl.watch("b", begun + 0.05)
        ttl.watch("a", begun + 0.01)
        ttl.watch("never", None)
        await anyio.sleep(0.5)
        group.cancel_scope.cancel()
    assert [name for name, _ in looks] == ["a", "a", "b", "a"]


@pytest.mark.parametrize("anyio_backend", JUMPING)
async def test_an_hour_is_an_hour() -> None:
    clock, stopped = AnyClock(), anyio.Event()
    begun = anyio.current_time()

    async def look(_sandbox: str) -> float | None:
        stopped.set()
        return None

    ttl = Ttl(clock, look)
    async with anyio.create_task_group() as group:
        group.start_soon(ttl.run)
        ttl.watch("a", begun + 3600)
        await stopped.wait()
        assert anyio.current_time() - begun == pytest.approx(3600, abs=1)
        group.cancel_scope.cancel()


async def test_a_look_that_hangs_holds_up_no_other() -> None:
    clock, seen = AnyClock(), anyio.Event()

    async def look(sandbox: str) -> float | None:
        if sandbox == "hangs":
            await anyio.sleep_forever()
        seen.set()
        return None

    ttl = Ttl(clock, look)
    async with anyio.create_task_group() as group:
        group.start_soon(ttl.run)
        ttl.watch("hangs", clock.monotonic())
        ttl.watch("other", clock.monotonic() + 0.01)
        with anyio.fail_after(5):
            await seen.wait()
        group.cancel_scope.cancel()


async def test_those_that_are_over_do_not_gather() -> None:
    clock = AnyClock()

    async def look(_sandbox: str) -> float | None:
        raise AssertionError("looked at one that is over")

    ttl = Ttl(clock, look)
    for number in range(3 * SLACK):
        ttl.watch(str(number), clock.monotonic() + 0.01)
        ttl.forget(str(number))
    assert len(ttl._heap) <= SLACK
    async with anyio.create_task_group() as group:
        group.start_soon(ttl.run)
        await anyio.sleep(0.05)
        group.cancel_scope.cancel()


@pytest.mark.parametrize("anyio_backend", JUMPING)
async def test_another_moment_comes_in_place_of_the_first() -> None:
    clock, begun, looks = AnyClock(), anyio.current_time(), list[float]()

    async def look(_sandbox: str) -> float | None:
        looks.append(clock.monotonic() - begun)
        return None

    ttl = Ttl(clock, look)
    async with anyio.create_task_group() as group:
        group.start_soon(ttl.run)
        ttl.watch("a", begun + 3600)
        for _ in range(10 * SLACK):
            ttl.watch("a", begun + 60)
        assert len(ttl._heap) <= 2 + SLACK
        await anyio.sleep(7200)
        group.cancel_scope.cancel()
    assert looks == [60.0]
