"""The edges this process knows: how to reach each, and how full it was when last seen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import msgspec
from starlette.types import ASGIApp

from dsec.base.clock import Clock
from dsec.base.errors import DsecError, NotFound, Unavailable
from dsec.base.ids import NodeId, SandboxId, node_id, node_of
from dsec.placement.overlay import Overlay
from dsec.wire.edge_v1 import EdgeApi
from dsec.wire.public_v1 import NodeView

logger = logging.getLogger("dsec.control")

DESCRIBE_TIMEOUT_S = 2.0
REFRESH_S = 2.0


@dataclass(eq=False)
class Edge:
    """One edge. Its node's name is what it says itself, so it is unknown until it first answers."""

    api: EdgeApi
    forward: ASGIApp
    """Takes a request on `/v1/sandboxes/{id}/...`; raises Unavailable if the edge is away."""
    address: str = "in this process"
    view: NodeView | None = None
    """As last described; `healthy` is False while the edge does not answer."""


class Edges:
    """All edges, with the views that placement decides on."""

    def __init__(self, edges: Sequence[Edge], clock: Clock) -> None:
        self._edges = list(edges)
        self._clock = clock
        self._by_node: dict[NodeId, Edge] = {}
        self.overlay = Overlay()

    async def run(self) -> None:
        """Keep the views fresh, for ever."""
        while True:
            await self.refresh()
            await anyio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Ask every edge how it is; one that does not answer in time counts as away."""
        async with anyio.create_task_group() as group:
            for edge in self._edges:
                group.start_soon(self._describe, edge)

    async def _describe(self, edge: Edge) -> None:
        asked = self._clock.monotonic()
        try:
            with anyio.fail_after(DESCRIBE_TIMEOUT_S):
                view = await edge.api.describe()
            node = node_id(view.id)
        except (DsecError, TimeoutError) as exc:
            self._away(edge, str(exc) or "no answer in time")
            return
        except Exception:  # one edge's fault must not end the task that looks after all
            logger.exception("cannot understand an edge", extra={"address": edge.address})
            self._away(edge, "a bug; see above")
            return
        if self._by_node.setdefault(node, edge) is not edge:
            self._away(edge, f"calls itself {node}, as does {self._by_node[node].address}")
            return
        if edge.view is None or not edge.view.healthy:
            logger.info("edge answers", extra={"node": node, "address": edge.address})
        edge.view = view
        self.overlay.seen(node, asked)

    def _away(self, edge: Edge, why: str) -> None:
        if edge.view is None or edge.view.healthy:
            logger.warning("edge is away", extra={"address": edge.address, "why": why})
        if edge.view is not None:
            edge.view = msgspec.structs.replace(edge.view, healthy=False)

    def views(self) -> list[NodeView]:
        """The latest view of every edge that has answered once."""
        return [edge.view for edge in self._edges if edge.view is not None]

    def all(self) -> list[tuple[NodeId, Edge]]:
        """Every edge that has answered once, with its node."""
        return list(self._by_node.items())

    def unheard(self) -> int:
        """How many edges have not told their node's name yet."""
        return sum(edge.view is None for edge in self._edges)

    def at(self, node: NodeId) -> Edge:
        """The edge of a node.

        Raises:
            Unavailable: no such node is known, but an edge has not told its name yet.
            NotFound: no such node.
        """
        if edge := self._by_node.get(node):
            return edge
        if any(edge.view is None for edge in self._edges):
            raise Unavailable(f"node {node} is not known yet", node=node)
        raise NotFound(f"no node {node}", kind="node")

    def of(self, sandbox: SandboxId) -> Edge:
        """The edge a sandbox's id names.

        Raises:
            Unavailable: as `at`.
            NotFound: there is no such node, so no such sandbox.
        """
        try:
            return self.at(node_of(sandbox))
        except NotFound:
            raise no_sandbox(sandbox) from None

    def placed(self, node: NodeId) -> None:
        """Count a placement until the node's next view shows it."""
        self.overlay.placed(node, self._clock.monotonic())


def no_sandbox(sandbox: str) -> NotFound:
    """The one refusal for a sandbox that does not exist and for one of a foreign project."""
    return NotFound(f"no sandbox {sandbox}", kind="sandbox")
