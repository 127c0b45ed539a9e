"""The edge's use case about what was tried in a sandbox: told while it lives, recorded when it ends."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine

import anyio
import msgspec

from dsec.base.clock import Clock
from dsec.base.errors import DsecError
from dsec.base.states import SandboxState
from dsec.edge import tampering
from dsec.edge.change_cases import ChangeCases
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.recording import Recordings
from dsec.edge.recording_ops import TAMPER
from dsec.kit.blocking import in_thread
from dsec.wire.sandbox import DiffEntry, TamperReport

logger = logging.getLogger("dsec.edge.tampering")

LAST_LOOK_S = 1.0
"""No end waits longer for its report."""


class TamperCases(ChangeCases):
    """The report."""

    recordings: Recordings
    _clock: Clock

    @abstractmethod
    def spawn(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """Do it as the edge's own task. Raises Unavailable."""

    async def tamper(self, sandbox: str) -> TamperReport:
        """What was tried in it and did not work, and which system files it has changed.

        Raises:
            NotFound, SandboxGone.
        """
        owner = await self.owner(sandbox, awake=False)
        return await self._report(owner, self._packer.diff)

    async def _report(self, owner: Owner, diff: tampering.Diff) -> TamperReport:
        backend = self._backends[owner.record.spec.backend]
        return await tampering.look(owner, backend, diff, self._clock.now())

    async def _last_look(self, owner: Owner) -> None:
        """Record what is to be told of a sandbox that is about to be stopped; never in the way."""
        if owner.state is not SandboxState.RUNNING:
            return
        with anyio.move_on_after(LAST_LOOK_S):
            try:
                report = await self._report(owner, self._quick_diff)
                if tampering.tells(report):
                    await self._record(owner, report)
            except DsecError as exc:
                about = {"sandbox_id": owner.record.id, "error": exc.message}
                logger.warning("its tamper report was not recorded", extra=about)
            except Exception:
                logger.exception("no tamper report", extra={"sandbox_id": owner.record.id})

    async def _record(self, owner: Owner, report: TamperReport) -> None:
        recording = await self.recordings.of(owner)
        if seq := await recording.attempt(TAMPER.name):
            await recording.end(seq, "ok", msgspec.to_builtins(report))

    async def _quick_diff(self, owner: Owner) -> list[DiffEntry]:
        """What it has written, if that can be anything of the system's.

        It is compared by a task of its own: its thread may need longer than the end waits.
        """
        writable = self._backends[owner.record.spec.backend].writable(owner.record)
        if writable is None or not await in_thread("disk", tampering.has_system, writable):
            return []
        found: list[DiffEntry] = []
        done = anyio.Event()

        async def compare() -> None:
            try:
                found.extend(await self._packer.diff(owner))
            except DsecError:
                return  # it is being removed
            finally:
                done.set()

        self.spawn(compare)
        await done.wait()
        return found
