"""Live resize: other limits for a sandbox that lives.

The new limits are written down, then they are made to hold. An edge that dies in between makes them
hold when it starts again; where they cannot be, those before come back.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dsec.base.errors import DsecError, InvalidRequest
from dsec.base.quantity import MIB
from dsec.edge.record import Resized, SandboxRecord, limits_of
from dsec.images import disk
from dsec.kit.blocking import in_thread
from dsec.linux import hostinfo

if TYPE_CHECKING:
    from dsec.edge.backends.interface import Backend
    from dsec.edge.lifecycle.journal import Journal
    from dsec.edge.lifecycle.owner import Owner
    from dsec.wire.sandbox import Limits, Resize

logger = logging.getLogger("dsec.edge.resizing")


async def resize(owner: Owner, change: Resize) -> None:
    """Give a live sandbox other limits; what `change` leaves out stays. All of it or nothing.

    Raises:
        SandboxGone: it is over. InvalidRequest: it can never have that here.
        Unsupported: a part cannot be changed here. Conflict: it uses more memory than that.
        CapacityUnavailable, StorageFull: the node has no room for a disk of that size.
    """
    await owner.resize(partial(_resize, change))


async def settle(owner: Owner, resized: Resized) -> None:
    """Make sure, after a restart, that the limits of a sandbox are those that were written down."""
    await owner.resize(partial(_settle, resized))


async def _resize(
    change: Resize, backend: Backend, journal: Journal, record: SandboxRecord
) -> SandboxRecord:
    wanted = _changed(record, change)
    if wanted == limits_of(record):
        return record
    total = (await in_thread("scan", hostinfo.memory)).total_bytes
    _check(record.spec.limits, wanted.limits, total)
    backend.refuse(wanted.over(record).spec)
    wanted = msgspec.structs.replace(wanted, warnings=_warnings(backend, record, wanted))
    return await _bring(backend, journal, record, wanted)


async def _settle(
    resized: Resized, backend: Backend, journal: Journal, record: SandboxRecord
) -> SandboxRecord:
    before = resized.before or resized
    try:
        return await _bring(backend, journal, before.over(record), resized)
    except (DsecError, OSError) as exc:
        logger.warning("limits are as before", extra={"sandbox_id": record.id, "why": str(exc)})
        return before.over(record)


async def _bring(
    backend: Backend, journal: Journal, record: SandboxRecord, wanted: Resized
) -> SandboxRecord:
    """Write down, make it hold, write down that it does; or all of it back."""
    before = limits_of(record)
    changed = wanted.over(record)
    await _write(journal, record, msgspec.structs.replace(wanted, before=before))
    try:
        await backend.resize(changed)
    except BaseException:
        await _undo(backend, journal, record)
        raise
    try:
        await _write(journal, record, msgspec.structs.replace(wanted, before=None))
    except (DsecError, OSError):  # they hold all the same, and the next start sees to it again
        logger.exception("resized, but not noted", extra={"sandbox_id": record.id})
    return changed


async def _undo(backend: Backend, journal: Journal, record: SandboxRecord) -> None:
    try:
        await backend.resize(record)
        await _write(journal, record, limits_of(record))
    except (DsecError, OSError):  # what is written down is settled by the next start
        logger.exception("limits could not be taken back", extra={"sandbox_id": record.id})


async def _write(journal: Journal, record: SandboxRecord, resized: Resized) -> None:
    with disk.full_disk_named(record.path.parent):
        await in_thread("disk", journal.limit, record.id, resized)


def _changed(record: SandboxRecord, change: Resize) -> Resized:
    named = ("memory_mb", "cpu_cores", "pids", "disk_mb")
    given = {name: value for name in named if (value := getattr(change, name)) is not None}
    limits = msgspec.structs.replace(record.spec.limits, **given)
    qos = change.qos or record.spec.qos
    return Resized(limits=limits, qos=qos, warnings=record.warnings)


def _check(now: Limits, wanted: Limits, memory_total_bytes: int) -> None:
    if wanted.memory_mb * MIB > memory_total_bytes:
        total_mb = memory_total_bytes // MIB
        raise InvalidRequest(
            f"memory_mb is {wanted.memory_mb} and the node has {total_mb} MiB",
            asked_mb=wanted.memory_mb,
            total_mb=total_mb,
        )
    if wanted.disk_mb == now.disk_mb:
        return
    if now.disk_mb is None:
        raise InvalidRequest("disk_mb: it was made without a limit, and can be given none")
    if (wanted.disk_mb or 0) < now.disk_mb:
        raise InvalidRequest(
            f"disk_mb: a disk cannot be made smaller than its {now.disk_mb} MiB",
            asked_mb=wanted.disk_mb,
            now_mb=now.disk_mb,
        )


def _warnings(backend: Backend, record: SandboxRecord, wanted: Resized) -> list[str]:
    """Those of before that do not come from its limits, and what the backend says of the new."""
    gone = set(backend.warnings(record.spec))
    kept = [words for words in record.warnings if words not in gone]
    return backend.warnings(wanted.over(record).spec) + kept
