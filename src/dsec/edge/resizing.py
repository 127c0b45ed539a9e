"""Live resize: other limits for a sandbox that lives."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dsec.base.errors import InvalidRequest
from dsec.base.quantity import MIB
from dsec.edge import changing
from dsec.edge.record import Changed, SandboxRecord, changeable
from dsec.kit.blocking import in_thread
from dsec.linux import hostinfo

if TYPE_CHECKING:
    from dsec.edge.backends.interface import Backend
    from dsec.edge.lifecycle.journal import Journal
    from dsec.edge.lifecycle.owner import Owner
    from dsec.wire.sandbox import Limits, Resize


async def resize(owner: Owner, change: Resize) -> None:
    """Give a live sandbox other limits; what `change` leaves out stays. All of it or nothing.

    Raises:
        SandboxGone: it is over. InvalidRequest: it can never have that here.
        Unsupported: a part cannot be changed here. Conflict: it uses more memory than that.
        CapacityUnavailable, StorageFull: the node has no room for a disk of that size.
    """
    await changing.asked(owner, partial(_resize, change))


async def _resize(
    change: Resize, backend: Backend, journal: Journal, record: SandboxRecord
) -> SandboxRecord:
    wanted = _changed(record, change)
    if wanted == changeable(record):
        return record
    total = (await in_thread("scan", hostinfo.memory)).total_bytes
    _check(record.spec.limits, wanted.limits, total)
    backend.refuse(wanted.over(record).spec)
    words = changing.warnings(backend, record, wanted)
    wanted = msgspec.structs.replace(wanted, warnings=words)
    return await changing.bring(journal, record, wanted, backend.resize)


def _changed(record: SandboxRecord, change: Resize) -> Changed:
    named = ("memory_mb", "cpu_cores", "pids", "disk_mb")
    given = {name: value for name in named if (value := getattr(change, name)) is not None}
    limits = msgspec.structs.replace(record.spec.limits, **given)
    qos = change.qos or record.spec.qos
    return msgspec.structs.replace(changeable(record), limits=limits, qos=qos)


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
