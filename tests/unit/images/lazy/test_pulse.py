"""When a worker's loop is taken to stand still."""

from __future__ import annotations

import os
from contextlib import closing, suppress

import anyio
import pytest

from dsec.images.lazy.pulse import Pulse, beat, longest_silence_s

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(jumping_clock: object) -> object:
    return jumping_clock


class StoppedClock:
    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


def test_a_worker_is_lost_when_it_beats_no_more_and_not_before_it_began() -> None:
    clock = StoppedClock()
    pulse = Pulse(longest_silence_s(45.0), clock)
    with closing(pulse):
        assert [lost_after(pulse, clock, 1.0) for _ in range(119)] == [False] * 119, "it starts"
        os.write(pulse.beating, b"..")
        assert not lost_after(pulse, clock, 1.0)
        assert [lost_after(pulse, clock, 1.0) for _ in range(46)] == [False] * 45 + [True]
        pulse.given()


def test_a_worker_that_never_begins_is_lost_too() -> None:
    clock = StoppedClock()
    pulse = Pulse(10.0, clock)
    with closing(pulse):
        assert [lost_after(pulse, clock, 1.0) for _ in range(121)] == [False] * 120 + [True]
        pulse.given()


def test_silence_while_the_keeper_stood_still_too_is_nobodys_fault() -> None:
    clock = StoppedClock()
    pulse = Pulse(10.0, clock)
    with closing(pulse):
        os.write(pulse.beating, b".")
        assert not lost_after(pulse, clock, 1.0)
        assert not lost_after(pulse, clock, 3600.0)
        assert [lost_after(pulse, clock, 100.0) for _ in range(5)] == [False] * 4 + [True]
        pulse.given()


def lost_after(pulse: Pulse, clock: StoppedClock, seconds: float) -> bool:
    clock.at += seconds
    return pulse.is_lost()


def test_how_long_a_worker_may_be_silent() -> None:
    assert [longest_silence_s(read_s) for read_s in (1.0, 45.0, 3600.0)] == [10.0, 45.0, 60.0]


async def test_who_beats_into_a_full_pipe_beats_on() -> None:
    clock = StoppedClock()
    pulse = Pulse(10.0, clock)
    with closing(pulse):
        with suppress(BlockingIOError):
            while os.write(pulse.beating, bytes(65536)):
                pass
        assert await beats_on(pulse)
        assert not pulse.is_lost()
    assert await beats_on(pulse), "nobody listens any more"
    pulse.given()
    await beat(None)


async def beats_on(pulse: Pulse) -> bool:
    with anyio.move_on_after(10) as scope:
        await beat(pulse.beating)
    return scope.cancelled_caught
