"""Other facts than its record's for a sandbox that lives: limits, class, network rules.

They are written down, then they are made to hold. An edge that dies in between makes them hold when
it starts again; where they cannot be, those before come back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dsec.base.errors import DsecError
from dsec.edge.backends.interface import NetworkOf
from dsec.edge.lifecycle import resting
from dsec.edge.record import Changed, SandboxRecord, changeable
from dsec.images import disk
from dsec.kit.blocking import in_thread

if TYPE_CHECKING:
    from dsec.edge.backends.interface import Backend
    from dsec.edge.lifecycle.journal import Journal
    from dsec.edge.lifecycle.owner import Owner
    from dsec.edge.lifecycle.surroundings import Changing

logger = logging.getLogger("dsec.edge.changing")

Apply = Callable[[SandboxRecord], Awaitable[None]]
"""Brings a sandbox to what its record says."""
EnterIt = Callable[["Backend", "Journal", SandboxRecord, str], Awaitable[None]]
Enter = Callable[["Owner", "Backend", "Journal", SandboxRecord, str], Awaitable[None]]
"""Brings a sandbox to the phase of its record, from another."""


async def bring(
    journal: Journal, record: SandboxRecord, wanted: Changed, apply: Apply
) -> SandboxRecord:
    """Write down, make it hold, write down that it does; or all of it back."""
    before = changeable(record)
    changed = wanted.over(record)
    await _write(journal, record, msgspec.structs.replace(wanted, before=before))
    try:
        await apply(changed)
    except BaseException:
        await _undo(journal, record, apply)
        raise
    try:
        await _write(journal, record, msgspec.structs.replace(wanted, before=None))
    except (DsecError, OSError):  # they hold all the same, and the next start sees to it again
        logger.exception("changed, but not noted", extra={"sandbox_id": record.id})
    return changed


async def asked(owner: Owner, work: Changing) -> None:
    """Change a sandbox for whoever asks, who may be of a job that others have taken over.

    Raises:
        SandboxGone: it is over. Conflict: it is held in its pause.
        What `work` raises: nothing has changed.
    """

    async def unless_held(
        backend: Backend, journal: Journal, record: SandboxRecord
    ) -> SandboxRecord:
        resting.check_wakes(record.id, owner.paused)  # now that it is its turn
        return await work(backend, journal, record)

    await owner.change(unless_held)


async def settle(owner: Owner, changed: Changed, enter: Enter) -> None:
    """Make sure, after a restart, that a sandbox has what was written down.

    Args:
        owner: of the sandbox.
        changed: what was written down.
        enter: brings it to another phase.
    """
    await owner.change(partial(_settle, changed, partial(enter, owner)))


async def finish(owner: Owner, enter: Enter) -> None:
    """Bring a sandbox to what was last written down, if it is not known to hold."""

    async def work(backend: Backend, journal: Journal, record: SandboxRecord) -> SandboxRecord:
        changed = await in_thread("disk", journal.changed, record.id)
        if changed is None or changed.before is None:
            return record
        return await _settle(changed, partial(enter, owner), backend, journal, record)

    await owner.change(work)


def warnings(backend: Backend, record: SandboxRecord, wanted: Changed) -> list[str]:
    """Those of before that do not come from what changes, and what the backend says of the new."""
    gone = set(backend.warnings(record.spec))
    kept = [words for words in record.warnings if words not in gone]
    return backend.warnings(wanted.over(record).spec) + kept


async def _settle(
    changed: Changed, enter: EnterIt, backend: Backend, journal: Journal, record: SandboxRecord
) -> SandboxRecord:
    before = changed.before or changed
    try:
        other = {changed.phase: before.phase, before.phase: changed.phase}
        apply = partial(_all, enter, backend, journal, other)
        return await bring(journal, before.over(record), changed, apply)
    except (DsecError, OSError) as exc:
        extra = {"sandbox_id": record.id, "why": str(exc)}
        logger.warning("limits and rules are as before", extra=extra)
        return before.over(record)


async def _all(
    enter: EnterIt,
    backend: Backend,
    journal: Journal,
    other: dict[str, str],
    record: SandboxRecord,
) -> None:
    before = other.get(record.phase, record.phase)
    if before != record.phase:
        await enter(backend, journal, record, before)
        return
    await backend.resize(record)
    if record.spec.network and isinstance(backend, NetworkOf):
        await backend.apply_network(record)


async def _undo(journal: Journal, record: SandboxRecord, apply: Apply) -> None:
    try:
        await apply(record)
        await _write(journal, record, changeable(record))
    except (DsecError, OSError):  # what is written down is settled by the next start
        logger.exception("a change could not be taken back", extra={"sandbox_id": record.id})


async def _write(journal: Journal, record: SandboxRecord, changed: Changed) -> None:
    with disk.full_disk_named(record.path.parent):
        await in_thread("disk", journal.change, record.id, changed)
