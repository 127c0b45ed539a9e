from __future__ import annotations

import pytest

from dsec.edge.uid_runs import FIRST, LAST, RUN, UidRuns


def test_the_lowest_free_run_is_next_and_none_is_had_twice() -> None:
    runs = UidRuns()
    taken = [runs.take() for _ in range(3)]
    assert taken == [FIRST, FIRST + RUN, FIRST + 2 * RUN]
    runs.give_back(taken[1])
    runs.give_back(taken[1])
    assert runs.take() == taken[1]
    assert runs.take() == FIRST + 3 * RUN


def test_a_run_of_an_adopted_sandbox_is_left_alone() -> None:
    runs = UidRuns()
    runs.claim(FIRST + RUN)
    assert [runs.take(), runs.take()] == [FIRST, FIRST + 2 * RUN]
    runs.give_back(FIRST + RUN)
    assert runs.take() == FIRST + RUN


def test_given_back_before_its_turn_came() -> None:
    runs = UidRuns()
    runs.claim(FIRST + RUN)
    runs.give_back(FIRST + RUN)
    assert [runs.take(), runs.take(), runs.take()] == [FIRST, FIRST + RUN, FIRST + 2 * RUN]


def test_there_is_an_end() -> None:
    runs = UidRuns(LAST - RUN)
    assert runs.free == 1
    runs.take()
    assert runs.free == 0
    with pytest.raises(IndexError):
        runs.take()
