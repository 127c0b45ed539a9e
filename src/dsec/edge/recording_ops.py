"""Which requests are operations on a sandbox, and what a trajectory calls them.

Commands are recorded by themselves (`recording_commands`); a look from outside is none at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dsec.base.errors import InvalidRequest
from dsec.edge.lives import CREATE, OVER
from dsec.trajectory.index import COMMAND

S = "/v1/sandboxes/{id}"
E = "/edge/v1/sandboxes/{id}"
ONE = f"{S}/commands/{{cid}}"


class Op(NamedTuple):
    """An operation."""

    name: str
    again: bool = True
    """Whether it may be done a second time when nobody knows how the first one ended."""
    once_with: str = ""
    """The argument, true or false, with which it may not although it may without."""
    replayed: bool = True
    """Whether a repeat under its idempotency key is answered from the record. One that is not has
    its own way of doing the same thing once, or changes nothing."""
    claims: bool = False
    """Whether the `key` in its body is its own: what is not replayed is done again under the same key,
    but for the same request only."""

    def may_repeat(self, args: Mapping[str, Any]) -> bool:
        """Whether a request may be done a second time when nobody knows how the first one ended."""
        return self.again and str(args.get(self.once_with, "")).lower() not in ("true", "1")


STOP, PAUSE, RESUME = Op("stop", replayed=False), Op("pause"), Op("resume")
OPS = {
    ("POST", f"{ONE}/stdin"): Op("command.stdin", again=False),
    ("POST", f"{ONE}/signal"): Op("command.signal", again=False),
    ("POST", f"{ONE}/resize"): Op("command.resize"),
    ("DELETE", ONE): Op("command.kill"),
    ("POST", f"{S}/sessions"): Op("session.open"),
    ("DELETE", f"{S}/sessions/{{sid}}"): Op("session.close"),
    ("GET", f"{S}/files"): Op("file.read", replayed=False),
    ("PUT", f"{S}/files"): Op("file.write", once_with="append"),
    ("DELETE", f"{S}/files"): Op("file.remove", again=False),
    ("GET", f"{S}/files/stat"): Op("file.stat", replayed=False),
    ("GET", f"{S}/files/list"): Op("file.list", replayed=False),
    ("POST", f"{S}/files/mkdir"): Op("file.mkdir", again=False),
    ("POST", f"{S}/files/move"): Op("file.move", again=False),
    ("GET", f"{S}/files/watch"): Op("file.watch", replayed=False),
    ("GET", f"{S}/tree"): Op("tree.read", replayed=False),
    ("PUT", f"{S}/tree"): Op("tree.write"),
    ("GET", f"{S}/processes"): Op("processes", replayed=False),
    ("DELETE", S): STOP,
    ("DELETE", E): STOP,
    ("POST", f"{S}/pause"): PAUSE,
    ("POST", f"{E}/pause"): PAUSE,
    ("POST", f"{S}/resume"): RESUME,
    ("POST", f"{E}/resume"): RESUME,
    ("PATCH", S): Op("resize"),
    ("PUT", f"{S}/network"): Op("network"),
    ("POST", f"{S}/phase"): Op("phase"),
    ("POST", f"{S}/pack"): Op("pack", again=False),
    ("POST", f"{S}/fork"): Op("fork", replayed=False, claims=True),
}
PORT = Op("port.open", replayed=False)
TAMPER = Op("tamper", replayed=False)
"""Written by the edge itself, as a sandbox that has something to tell of ends."""
NAMES = frozenset(op.name for op in (*OPS.values(), PORT, TAMPER)) | {CREATE, COMMAND, OVER}
"""Everything a trajectory may have."""


def checked_names(ops: Sequence[str]) -> list[str]:
    """Names of operations.

    Raises:
        InvalidRequest: there is no such operation.
    """
    for op in ops:
        if op not in NAMES:
            raise InvalidRequest(f"op: {op!r} is none of {', '.join(sorted(NAMES))}", place="op")
    return [*ops]
