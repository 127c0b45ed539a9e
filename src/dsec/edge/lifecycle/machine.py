"""What happens to a sandbox, as one pure function: (state, event) -> (state, actions).

Actions are carried out in order, each journaled before it begins. An action that fails becomes an
event itself, so that every way out of here is a line of this table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dsec.base.states import FINAL, SandboxState, StopReason, may_move

S = SandboxState


class Action(enum.StrEnum):
    """What the owner has to do. The value is the word in the journal."""

    LAUNCH = "launch"
    CONNECT = "connect"
    KILL = "kill"
    CLEAN = "clean"
    FORGET = "forget"
    """Write down how it ended, then give up its directory."""
    PAUSE = "pause"
    """Freeze it and take back its memory."""
    RESUME = "resume"
    """Let it go on; also what undoes a pause that failed."""
    STILL = "still"
    """Freeze it for a moment, the state unchanged: no line of the table, but of the journal."""


@dataclass(frozen=True)
class Ordered:
    """A create request was admitted and journaled."""


@dataclass(frozen=True)
class Launched:
    """It runs and its aether answers."""


@dataclass(frozen=True)
class LaunchFailed:
    """It could not be launched; whatever was made has been taken back by the backend."""


@dataclass(frozen=True)
class PauseWanted:
    """Somebody asked, or it was idle and that is what its idle time is for."""


@dataclass(frozen=True)
class Paused:
    """It stands still, and its memory is given back."""


@dataclass(frozen=True)
class PauseFailed:
    """It could not be frozen, or that could not be written down."""


@dataclass(frozen=True)
class ResumeWanted:
    """Somebody asked, or wants something of it."""


@dataclass(frozen=True)
class Resumed:
    """It runs again."""


@dataclass(frozen=True)
class ResumeFailed:
    """It could not be let go on, and stands still: after a pause, half of one, or a moment."""


@dataclass(frozen=True)
class StopWanted:
    """Somebody asked, or a clock ran out."""

    reason: StopReason


@dataclass(frozen=True)
class Died:
    """Its channel ended and its aether cannot be reached any more."""


@dataclass(frozen=True)
class Cleaned:
    """Nothing of it is left."""


@dataclass(frozen=True)
class Found:
    """The edge came back and its journal says that it should be there."""

    answers: bool
    stopping: StopReason | None = None
    """Why its removal had begun, if it had."""


Event = (
    Ordered
    | Launched
    | LaunchFailed
    | PauseWanted
    | Paused
    | PauseFailed
    | ResumeWanted
    | Resumed
    | ResumeFailed
    | StopWanted
    | Died
    | Cleaned
    | Found
)


@dataclass(frozen=True)
class Step:
    """What follows from an event."""

    state: SandboxState
    actions: tuple[Action, ...] = ()
    reason: StopReason | None = None
    """Why it is over, when this step makes that certain."""


REMOVAL = (Action.KILL, Action.CLEAN, Action.FORGET)
ALIVE = frozenset({S.RUNNING, S.PAUSING, S.PAUSED, S.RESUMING})
"""States in which there is a sandbox, running or not."""

_PAUSING: dict[tuple[SandboxState, type], Step] = {
    (S.RUNNING, PauseWanted): Step(S.PAUSING, (Action.PAUSE,)),
    (S.PAUSING, Paused): Step(S.PAUSED),
    (S.PAUSING, PauseFailed): Step(S.RUNNING, (Action.RESUME,)),
    (S.PAUSED, ResumeWanted): Step(S.RESUMING, (Action.RESUME,)),
    (S.RESUMING, Resumed): Step(S.RUNNING),
    (S.RESUMING, ResumeFailed): Step(S.PAUSED),
    (S.RUNNING, ResumeFailed): Step(S.PAUSED),
    (S.PAUSED, Found): Step(S.PAUSED),
}


def step(state: SandboxState, event: Event) -> Step:
    """Decide.

    Raises:
        ValueError: the event cannot happen in this state; our bug.
    """
    after = _step(state, event)
    if after.state is not state and not may_move(state, after.state):
        raise ValueError(f"{event} in {state} would lead to {after.state}")
    return after


def _step(state: SandboxState, event: Event) -> Step:
    if state is S.CREATING:
        return _created(event)
    if state in ALIVE:
        return _alive(state, event)
    if isinstance(event, Cleaned) and (state in FINAL or state is S.STOPPING):
        return Step(S.STOPPED if state is S.STOPPING else state)
    if isinstance(event, StopWanted | Died) and (state in FINAL or state is S.STOPPING):
        return Step(state)  # too late to matter
    raise ValueError(f"{event} cannot happen in {state}")


def _alive(state: SandboxState, event: Event) -> Step:
    match event:
        case StopWanted(reason):
            return Step(S.STOPPING, REMOVAL, reason)
        case Died():
            return Step(S.FAILED, REMOVAL, StopReason.DIED)
        case Found(answers=False) if state is S.PAUSED:
            return Step(S.LOST, REMOVAL, StopReason.NODE_LOST)
    if found := _PAUSING.get((state, type(event))):
        return found
    raise ValueError(f"{event} cannot happen in {state}")


def _created(event: Event) -> Step:
    match event:
        case Ordered():
            return Step(S.CREATING, (Action.LAUNCH, Action.CONNECT))
        case Launched() | Found(answers=True, stopping=None):
            return Step(S.RUNNING)
        case LaunchFailed():
            return Step(S.FAILED, REMOVAL, StopReason.LAUNCH_FAILED)
        case StopWanted(reason) | Found(stopping=StopReason() as reason):
            return Step(S.STOPPING, REMOVAL, reason)
        case Found():
            return Step(S.LOST, REMOVAL, StopReason.NODE_LOST)
        case _:
            raise ValueError(f"{event} cannot happen in {S.CREATING}")
