"""First and last words of a sandbox's trajectory, and where it is kept when the sandbox is over.

    <state>/sandboxes/<id>/trajectory     while it lives
    <state>/trajectories/<id>             afterwards, as long as its ending is remembered

The life's own entries are written with the journal's steps, by the same thread. All of it blocks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dsec.edge.histories import TRAJECTORY
from dsec.edge.phases import without_secrets
from dsec.edge.record import SandboxRecord
from dsec.trajectory import writer
from dsec.trajectory.format import Begun, Ended, frame
from dsec.trajectory.index import load
from dsec.wire.sandbox import SandboxView

logger = logging.getLogger("dsec.edge.lives")

CREATE, OVER = "create", "over"


def begin(record: SandboxRecord) -> None:
    """Write that a sandbox is being made, after what it has inherited.

    Raises:
        OSError: it cannot be written.
    """
    path = record.path / TRAJECTORY
    own = record.inherited + 1
    entry = Begun(own, record.created_at, CREATE, caller=record.created_by, args=_facts(record))
    if record.inherited:
        writer.append(path, frame(entry))
    else:
        writer.create(path, [entry])


def made(record: SandboxRecord, now: float) -> None:
    """Write that it runs."""
    path = record.path / TRAJECTORY
    with _logged(record.id):
        writer.append(path, frame(Ended(record.inherited + 1, now, "ok")))


def end(trajectory: Path, kept: Path, view: SandboxView) -> None:
    """Write how it ended, and move its trajectory to where it is kept. Idempotent."""
    if not trajectory.exists():
        return
    with _logged(view.id):
        last = load(trajectory).last + 1
        at = view.ended_at or 0.0
        result = {"state": str(view.state), "reason": str(view.stop_reason or "")}
        if view.stop_detail:
            result["detail"] = view.stop_detail
        begun, ended = Begun(last, at, OVER), Ended(last, at, "ok", dict(result))
        writer.append(trajectory, frame(begun) + frame(ended))
    trajectory.rename(kept)


def _facts(record: SandboxRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "spec": msgspec.to_builtins(without_secrets(record.spec)),
        "environment": record.environment.digest,
        "image_digest": record.image.digest,
    }
    return facts | ({"parent": record.parent} if record.parent else {})


@contextlib.contextmanager
def _logged(sandbox: str) -> Iterator[None]:
    """A full disk must not keep a sandbox from going on, or from being removed."""
    try:
        yield
    except OSError:
        logger.exception("its trajectory could not be written", extra={"sandbox_id": sandbox})
