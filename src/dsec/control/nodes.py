"""Nodes: a look at the fleet."""

from __future__ import annotations

from dsec.control.access import Caller
from dsec.control.edges import Edges
from dsec.iam.permissions import Permission
from dsec.wire.public_v1 import NodeView


class Nodes:
    """The fleet, for those who may see it."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def list(self, caller: Caller) -> list[NodeView]:
        """How every node is now.

        Raises:
            PermissionDenied: the caller may not see nodes.
        """
        caller.require_somewhere(Permission.NODE_READ)
        await self._edges.refresh()
        return sorted(self._edges.views(), key=lambda node: node.id)
