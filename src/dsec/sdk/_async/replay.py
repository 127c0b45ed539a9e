"""A trajectory done again in a fresh sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from typing_extensions import override

from dsec.base.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StorageFull,
    Unsupported,
)
from dsec.sdk._async.call import Caller, EventStream
from dsec.sdk._async.sandbox import Sandbox
from dsec.sdk._ids import Given
from dsec.sdk.replaying import Change, Leave, Replayed, Run, compare, inputs_of, plan
from dsec.trajectory.diff import Step
from dsec.wire.sandbox import Recorded, SandboxView

_REFUSED = (InvalidRequest, NotFound, Conflict, Unsupported, PayloadTooLarge, StorageFull)
"""What a sandbox answers to a step. Anything else was not its answer, and the step is not done."""


class Replay(EventStream[Replayed]):
    """Does what was recorded again, in order, one step for each turn of the loop.

    `sandbox` is the fresh one; it goes on when the replay is over.
    """

    def __init__(self, caller: Caller, view: SandboxView, entries: Sequence[Recorded]) -> None:
        self._ids = Given()
        self._caller = caller.numbering(self._ids)
        self._again = Sandbox(self._caller, view)
        self._left = iter(entries)
        self._inputs = inputs_of(entries)
        self._done: list[Recorded] = []
        self.sandbox = Sandbox(caller, view)

    @override
    async def __anext__(self) -> Replayed:
        """Do the next step; what changes nothing is passed over.

        Raises:
            DsecError: the fresh sandbox is over, the platform stays unreachable, or it does not let
                you (any more).
        """
        for entry in self._left:
            wanted = plan(entry, self._inputs)
            if not isinstance(wanted, Leave):
                await self._do(entry, wanted)
                self._done.append(entry)
                return Replayed(entry)
            if wanted.why:
                return Replayed(entry, wanted.why)
        raise StopAsyncIteration

    async def _do(self, entry: Recorded, wanted: Run | Change) -> None:
        self._ids.next = entry.id
        # What was refused then may be refused now: the fresh sandbox's own record says so.
        with suppress(*_REFUSED):
            if isinstance(wanted, Run):
                await self._again._run(wanted.spec, wanted.given, ours=False)  # noqa: SLF001
            else:
                await getattr(self._again.files, wanted.call)(**wanted.keywords)

    async def compare(self) -> list[Step]:
        """What was recorded beside what has come of it now, step by step."""
        async with self.sandbox.trajectory() as trajectory:
            again = [entry async for entry in trajectory]
        return [*compare(self._done, again)]

    @override
    async def aclose(self) -> None:
        """Do no more steps; the fresh sandbox goes on."""
        self._left = iter(())
