"""How an answer says that nodes are missing from it."""

from __future__ import annotations

from collections.abc import Sequence

from dsec.base.ids import NodeId


def silent_header(silent: Sequence[NodeId]) -> dict[str, str] | None:
    """Says which nodes did not answer.

    A dead node must not hide the living ones; who cares can see that something is missing.
    """
    return {"X-Dsec-Silent-Nodes": ",".join(silent)} if silent else None
