# Generated from ../_async by tools/unasync.py; do not edit.
"""A trajectory done again in a fresh sandbox."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from typing_extensions import override

from dsec.base.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StorageFull,
    Unsupported,
)
from dsec.sdk._ids import Given
from dsec.sdk._sync.call import Caller, EventStream
from dsec.sdk._sync.files import Files
from dsec.sdk._sync.state import Trajectory
from dsec.sdk.models import ExecResult
from dsec.sdk.replaying import Change, Leave, Replayed, Run, compare, inputs_of, plan
from dsec.trajectory.diff import Step
from dsec.wire.sandbox import CommandSpec, Recorded, SandboxSpec, SandboxView

_REFUSED = (
    InvalidRequest,
    NotFound,
    Conflict,
    Unsupported,
    PayloadTooLarge,
    StorageFull,
)
"""What a sandbox answers to a step. Anything else was not its answer, and the step is not done."""


class Hand(Protocol):
    """A handle on a sandbox, as a replay uses it: `Sandbox`."""

    files: Files

    def trajectory(self) -> Trajectory:
        """What has happened in it."""
        ...

    def stop(self) -> SandboxView:
        """Stop it."""
        ...

    def _run(
        self, spec: CommandSpec, given: bytes | str | None, *, ours: bool
    ) -> ExecResult: ...


H = TypeVar("H", bound=Hand)


class Replay(EventStream[Replayed], Generic[H]):
    """Does what was recorded again, in order, one step for each turn of the loop.

    `sandbox` is the fresh one; it goes on when the replay is over.
    """

    def __init__(
        self,
        hand: Callable[[Caller, SandboxView], H],
        caller: Caller,
        view: SandboxView,
        entries: Sequence[Recorded],
    ) -> None:
        self._ids = Given()
        self._again = hand(caller.numbering(self._ids), view)
        self._left = iter(entries)
        self._inputs = inputs_of(entries)
        self._done: list[Recorded] = []
        self.sandbox = hand(caller, view)

    @override
    def __next__(self) -> Replayed:
        """Do the next step; what changes nothing is passed over.

        Raises:
            DsecError: the fresh sandbox is over, the platform stays unreachable, or it does not let
                you (any more).
        """
        for entry in self._left:
            wanted = plan(entry, self._inputs)
            if not isinstance(wanted, Leave):
                self._do(entry, wanted)
                self._done.append(entry)
                return Replayed(entry)
            if wanted.why:
                return Replayed(entry, wanted.why)
        raise StopIteration

    def _do(self, entry: Recorded, wanted: Run | Change) -> None:
        self._ids.next = entry.id
        # What was refused then may be refused now: the fresh sandbox's own record says so.
        with suppress(*_REFUSED):
            if isinstance(wanted, Run):
                self._again._run(wanted.spec, wanted.given, ours=False)  # noqa: SLF001
            else:
                getattr(self._again.files, wanted.call)(**wanted.keywords)

    def compare(self) -> list[Step]:
        """What was recorded beside what has come of it now, step by step."""
        with self.sandbox.trajectory() as trajectory:
            again = [entry for entry in trajectory]
        return [*compare(self._done, again)]

    @override
    def close(self) -> None:
        """Do no more steps; the fresh sandbox goes on."""
        self._left = iter(())


def made(caller: Caller, spec: SandboxSpec, timeout: float) -> SandboxView:
    """Have a fresh sandbox, within so many seconds; raises as `client.run_container`."""
    key = secrets.token_hex(16)
    request = caller.request("POST", "/v1/sandboxes", body=spec, key=key)
    # Capacity and quota may free up until the deadline.
    return caller.call(request, SandboxView, caller.patience(timeout, timeout))
