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


Event = Ordered | Launched | LaunchFailed | StopWanted | Died | Cleaned | Found


@dataclass(frozen=True)
class Step:
    """What follows from an event."""

    state: SandboxState
    actions: tuple[Action, ...] = ()
    reason: StopReason | None = None
    """Why it is over, when this step makes that certain."""


REMOVAL = (Action.KILL, Action.CLEAN, Action.FORGET)


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
    if isinstance(event, StopWanted) and state is S.RUNNING:
        return Step(S.STOPPING, REMOVAL, event.reason)
    if isinstance(event, Died) and state is S.RUNNING:
        return Step(S.FAILED, REMOVAL, StopReason.DIED)
    if isinstance(event, Cleaned) and (state in FINAL or state is S.STOPPING):
        return Step(S.STOPPED if state is S.STOPPING else state)
    if isinstance(event, StopWanted | Died) and (state in FINAL or state is S.STOPPING):
        return Step(state)  # too late to matter
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
