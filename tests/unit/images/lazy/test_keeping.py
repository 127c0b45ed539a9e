"""Parts of the keeper."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.base.errors import InternalError
from dsec.images.lazy import keeper
from dsec.images.lazy.handed import Handed
from dsec.images.lazy.keeper import Restarts, bound_log


class StoppedClock:
    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


def test_the_first_restart_is_at_once_and_the_tenth_is_none() -> None:
    clock = StoppedClock()
    restarts = Restarts(clock)
    delays = [restarts.delay_after_end() for _ in range(10)]
    assert delays[0] == 0.0
    assert delays[9] is None
    waits = [delay for delay in delays[:9] if delay is not None]
    assert waits == sorted(waits)
    assert sum(waits) < 30
    clock.at += 61
    assert restarts.delay_after_end() == 0.0


def test_the_log_stays_short(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("ab") as writer:
        writer.write(b"a" * (keeper.MAX_LOG_BYTES + 1))
        writer.flush()
        bound_log(file)
        writer.write(b"b")
    assert file.read_bytes() == b"b"
    assert (tmp_path / "log.1").stat().st_size == keeper.MAX_LOG_BYTES + 1


def test_what_is_handed_down_comes_back() -> None:
    for handed in (Handed(3, 7, 4711, 5), Handed(3, 7, 4711)):
        assert Handed.decode({"DSEC_FILLER_FDS": handed.encode()}) == handed
    for wrong in ("", "kernel=3", "kernel=x,generation=0,parent=1"):
        with pytest.raises(InternalError):
            Handed.decode({"DSEC_FILLER_FDS": wrong})
