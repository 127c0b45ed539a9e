"""What to say of what an owner could not do: a full disk first, as that can be helped."""

from __future__ import annotations

from dsec.base.errors import DsecError, StartFailed
from dsec.edge.record import SandboxRecord
from dsec.images import disk
from dsec.kit.http import as_error


def not_written(record: SandboxRecord, exc: OSError) -> DsecError:
    """Of a creation that could not be journaled."""
    return _not_made(record, exc, "its journal could not be written", "journal")


def not_started(record: SandboxRecord, exc: OSError) -> DsecError:
    """Of a launch."""
    return _not_made(record, exc, "could not be started", "launch")


def _not_made(record: SandboxRecord, exc: OSError, what: str, step: str) -> DsecError:
    if exc.errno in disk.FULL:
        return disk.storage_full(record.path.parent)
    return StartFailed(f"{what}: {exc}", step=step, errno=exc.errno)


def not_paused(record: SandboxRecord, exc: Exception) -> DsecError:
    """Of a pause."""
    if isinstance(exc, OSError) and exc.errno in disk.FULL:
        return disk.storage_full(record.path.parent)
    return as_error(exc)
