from __future__ import annotations

from dsec.base.states import SandboxState
from dsec.edge.ended import BATCH, Ended
from dsec.wire.sandbox import Limits, SandboxView


class Clock:
    at = 1000.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


def view(number: int, ended_at: float = 1000.0) -> SandboxView:
    return SandboxView(
        id=str(number),
        node="n001",
        backend="sim",
        image="x",
        state=SandboxState.STOPPED,
        created_at=0.0,
        limits=Limits(),
        ended_at=ended_at,
    )


def test_the_oldest_are_forgotten_in_batches() -> None:
    ended = Ended(Clock(), max_count=10)
    for number in range(10 + BATCH - 1):
        ended.add(view(number))
    assert ended.overdue() == []
    ended.add(view(9999))
    assert ended.overdue() == [str(number) for number in range(BATCH)]
    assert len(ended.all()) == 10
    assert ended.get("0") is None
    assert ended.get("9999") is not None


def test_the_old_are_forgotten() -> None:
    clock = Clock()
    ended = Ended(clock, max_age_s=100)
    ended.add(view(1, 950.0))
    ended.add(view(2, 990.0))
    assert ended.overdue() == []
    clock.at = 1060.0
    assert ended.overdue() == ["1"]
