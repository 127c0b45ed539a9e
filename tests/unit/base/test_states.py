"""The table of states: a stop is possible from anywhere that is not final."""

from __future__ import annotations

from dsec.base.states import FINAL, TRANSITIONS, SandboxState, may_move


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(SandboxState)


def test_every_state_that_is_not_final_can_be_stopped_or_found_lost() -> None:
    for state in set(SandboxState) - FINAL - {SandboxState.STOPPING}:
        assert may_move(state, SandboxState.STOPPING)
        assert may_move(state, SandboxState.LOST)


def test_final_states_are_final() -> None:
    assert {SandboxState.STOPPED, SandboxState.FAILED, SandboxState.LOST} == FINAL
