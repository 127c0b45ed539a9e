"""Which of a sandbox's operations may be going on, of those whose end is not on record.

Nothing is written of it, and nothing done when an edge starts: what a former life of the edge has
begun and not ended was interrupted with it, and that is known when the trajectory is first used. Only
commands outlive the edge, in sandboxes that do; their aether is asked for them.
"""

from __future__ import annotations

import anyio

from dsec.base.errors import DsecError, NotFound, SandboxGone
from dsec.base.states import SandboxState
from dsec.edge import commands
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.recording import Recording
from dsec.edge.recording_commands import RecordedCommands
from dsec.trajectory.reader import NONE, Going

PATIENCE_S = 5.0
"""With an aether that does not answer: what it was not asked for may be going on."""


async def going(recorded: RecordedCommands, owner: Owner | None) -> Going:
    """What may be going on in a sandbox; None: it is over."""
    if owner is None or owner.ended_at is not None:
        return NONE
    if not owner.ready.is_set():
        return Going(after=owner.record.inherited)
    try:
        recording = await recorded.of(owner)
    except SandboxGone:
        return NONE
    return Going(recording.before, await _outliving(recorded, owner, recording))


async def _outliving(recorded: RecordedCommands, owner: Owner, recording: Recording) -> set[int]:
    """Commands of former lives that go on, or may; the ends of the others are on record by then."""
    found = recording.index.running_before(recording.before)
    if owner.state is SandboxState.RUNNING:  # or it stands still, and what ran in it may go on
        with anyio.move_on_after(PATIENCE_S):
            for seq, command in [*found.items()]:
                if not await _is_known(recorded, owner, command) and seq not in recording.trying:
                    del found[seq]
    return {*found}


async def _is_known(recorded: RecordedCommands, owner: Owner, command: str) -> bool:
    """Whether aether has that command, for all one can tell: without, it was never started."""
    try:
        view = await commands.view(owner, command)
        if not view.running:
            await recorded.result(owner, command)
    except NotFound:
        return False
    except DsecError:
        return True
    return True
