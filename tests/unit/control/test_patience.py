"""When nobody listened for a while, holders have time again to renew."""

from __future__ import annotations

from dsec.base.ids import PrincipalId, ProjectId
from dsec.control.patience import PATIENCE_S, Patience
from dsec.store.records import Lease, Terms, first_lease


class Clock:
    def __init__(self) -> None:
        self.wall, self.mono = 1.8e9, 0.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.mono

    def run(self, seconds: float) -> None:
        self.wall += seconds
        self.mono += seconds


def lease(ttl_s: float = 60.0) -> Lease:
    terms = Terms(
        holder=PrincipalId("ada"),
        ttl_s=ttl_s,
        expires_at=0.0,
        on_lapse="pause",
        on_superseded="reap",
        at=0.0,
    )
    return first_lease(ProjectId("team"), "run", terms)


def test_it_is_as_long_as_the_lease_and_not_endless() -> None:
    clock = Clock()
    patience = Patience(clock)
    assert patience.left(lease(5.0)) == 5.0
    assert patience.left(lease(3600.0)) == PATIENCE_S
    clock.run(PATIENCE_S)
    patience.look()
    assert patience.left(lease(3600.0)) == 0.0


def test_a_sleep_that_took_too_long_begins_it_anew() -> None:
    clock = Clock()
    patience = Patience(clock)
    clock.run(100.0)
    with patience.sleeping(10.0):
        clock.run(10.5)
    assert patience.left(lease()) == 0.0
    with patience.sleeping(10.0):
        clock.run(30.0)
    assert patience.left(lease()) == PATIENCE_S


def test_a_host_that_slept_begins_it_anew() -> None:
    clock = Clock()
    patience = Patience(clock)
    clock.run(100.0)
    patience.look()
    assert patience.left(lease()) == 0.0
    clock.wall += 600.0
    patience.look()
    assert patience.left(lease()) == PATIENCE_S
    clock.run(PATIENCE_S)
    patience.look()
    assert patience.left(lease()) == 0.0
