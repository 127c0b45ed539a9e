from __future__ import annotations

import pytest

from dsec.base.states import FINAL, SandboxState, StopReason
from dsec.edge.lifecycle.machine import (
    REMOVAL,
    Action,
    Cleaned,
    Died,
    Event,
    Found,
    Launched,
    LaunchFailed,
    Ordered,
    Paused,
    PauseFailed,
    PauseWanted,
    Resumed,
    ResumeFailed,
    ResumeWanted,
    StopWanted,
    step,
)

S = SandboxState
IDLE = StopWanted(StopReason.IDLE)


@pytest.mark.parametrize(
    ("state", "event", "after", "actions", "reason"),
    [
        (S.CREATING, Ordered(), S.CREATING, (Action.LAUNCH, Action.CONNECT), None),
        (S.CREATING, Launched(), S.RUNNING, (), None),
        (S.CREATING, LaunchFailed(), S.FAILED, REMOVAL, StopReason.LAUNCH_FAILED),
        (S.CREATING, IDLE, S.STOPPING, REMOVAL, StopReason.IDLE),
        (S.RUNNING, IDLE, S.STOPPING, REMOVAL, StopReason.IDLE),
        (S.RUNNING, Died(), S.FAILED, REMOVAL, StopReason.DIED),
        (S.RUNNING, PauseWanted(), S.PAUSING, (Action.PAUSE,), None),
        (S.PAUSING, Paused(), S.PAUSED, (), None),
        (S.PAUSING, PauseFailed(), S.RUNNING, (Action.RESUME,), None),
        (S.PAUSED, ResumeWanted(), S.RESUMING, (Action.RESUME,), None),
        (S.RESUMING, Resumed(), S.RUNNING, (), None),
        (S.RESUMING, ResumeFailed(), S.PAUSED, (), None),
        (S.RUNNING, ResumeFailed(), S.PAUSED, (), None),
        (S.PAUSED, Found(answers=True), S.PAUSED, (), None),
        (S.PAUSED, Found(answers=False), S.LOST, REMOVAL, StopReason.NODE_LOST),
        (S.PAUSED, Died(), S.FAILED, REMOVAL, StopReason.DIED),
        (S.STOPPING, Cleaned(), S.STOPPED, (), None),
        (S.STOPPING, IDLE, S.STOPPING, (), None),
        (S.STOPPING, Died(), S.STOPPING, (), None),
        (S.FAILED, Cleaned(), S.FAILED, (), None),
        (S.STOPPED, IDLE, S.STOPPED, (), None),
        (S.CREATING, Found(answers=True), S.RUNNING, (), None),
        (S.CREATING, Found(answers=False), S.LOST, REMOVAL, StopReason.NODE_LOST),
        (
            S.CREATING,
            Found(answers=True, stopping=StopReason.LIFETIME),
            S.STOPPING,
            REMOVAL,
            StopReason.LIFETIME,
        ),
    ],
)
def test_what_follows(
    state: S, event: Event, after: S, actions: tuple[Action, ...], reason: StopReason | None
) -> None:
    got = step(state, event)
    assert (got.state, got.actions, got.reason) == (after, actions, reason)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (S.RUNNING, Launched()),
        (S.RUNNING, Cleaned()),
        (S.RUNNING, Found(answers=False)),
        (S.RUNNING, ResumeWanted()),
        (S.CREATING, Died()),
        (S.CREATING, PauseWanted()),
        (S.PAUSED, PauseWanted()),
        (S.STOPPING, ResumeWanted()),
        (S.STOPPED, Ordered()),
    ],
)
def test_what_cannot_happen_is_our_bug(state: S, event: Event) -> None:
    with pytest.raises(ValueError, match="cannot happen"):
        step(state, event)


def test_a_stop_leads_out_of_every_living_state_the_edge_uses() -> None:
    for state in (S.CREATING, S.RUNNING, S.PAUSING, S.PAUSED, S.RESUMING):
        assert step(state, IDLE).actions == REMOVAL
    for state in FINAL:
        assert step(state, IDLE).state is state
