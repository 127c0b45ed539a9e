"""Trajectories: who tells one, also when the node of its sandbox is gone.

A node that answers tells its own. Of a sandbox whose node is away, was removed, or has forgotten it,
any other node tells what was sent to the store they share.

Who may read: what the sandbox's edge has said of its project, as for everything else; if this
process never heard that or has forgotten, the document in the store. That is believed for this
reading alone and never remembered, so that nothing in a store opens a sandbox that lives. The node
that tells hears which project was allowed, and refuses if the record itself, which the document
cannot change, is of another (`dsec.edge.shipping` says what trust is left in the store).
"""

from __future__ import annotations

from typing import NamedTuple

import anyio

from dsec.base.errors import DataUnavailable, DsecError, NotFound, Unavailable
from dsec.base.ids import ProjectId, SandboxId, node_of
from dsec.control.access import Caller
from dsec.control.edges import Edge, Edges, no_sandbox
from dsec.control.ownership import Ownership
from dsec.iam.permissions import Permission
from dsec.wire.edge_v1 import SentTrajectory

SEARCH_TIMEOUT_S = 20.0
ASK_TIMEOUT_S = 5.0
"""For one node, which asks its store."""
SEARCHES_AT_ONCE = 16
"""Each asks one node after another; more of them wait for their turn."""


class Teller(NamedTuple):
    """Who tells a trajectory, and the project its reader was allowed it in."""

    edge: Edge
    project: ProjectId


class Trajectories:
    """Finds who tells them."""

    def __init__(self, edges: Edges, ownership: Ownership) -> None:
        self._edges = edges
        self._ownership = ownership
        self._searches = anyio.Semaphore(SEARCHES_AT_ONCE)

    async def teller(self, caller: Caller, permission: Permission, sandbox: SandboxId) -> Teller:
        """The edge to ask for what happened in a sandbox, for a caller who may hear it.

        Raises:
            NotFound: there is no such sandbox, or not for this caller: the answers are alike.
            PermissionDenied: the caller sees it but may not do this.
            Unavailable: its node is away, and its record was not sent, or that cannot be seen.
            DataUnavailable: what the store says of it cannot be trusted.
        """
        try:
            project = ProjectId((await self._ownership.look(sandbox)).project)
        except (NotFound, Unavailable) as missing:
            return await self._from_store(caller, permission, sandbox, missing)
        caller.require(permission, project, f"sandbox {sandbox}")
        return Teller(self._edges.of(sandbox), project)

    async def _from_store(
        self, caller: Caller, permission: Permission, sandbox: SandboxId, missing: DsecError
    ) -> Teller:
        known = self._ownership.recall(sandbox)
        if known is not None:
            caller.require(permission, known, f"sandbox {sandbox}")
        edge, sent = await self._find(sandbox, missing)
        project = ProjectId(sent.project)
        if known not in (None, project):
            raise DataUnavailable(f"the store does not say of {sandbox} what its node has said")
        caller.require(permission, project, f"sandbox {sandbox}")
        return Teller(edge, project)

    async def _find(self, sandbox: SandboxId, missing: DsecError) -> tuple[Edge, SentTrajectory]:
        try:
            with anyio.fail_after(SEARCH_TIMEOUT_S):
                async with self._searches:
                    return await self._search(sandbox)
        except NotFound:
            raise self._not_sent(sandbox, missing) from None
        except DataUnavailable:
            raise
        except (Unavailable, TimeoutError) as exc:
            why = str(exc) or "no answer in time"
            raise Unavailable(
                f"{missing.message}; whether the record of {sandbox} is in the store cannot be "
                f"seen: {why}"
            ) from exc

    async def _search(self, sandbox: SandboxId) -> tuple[Edge, SentTrajectory]:
        """Ask those that answer, one after another: they may have different stores."""
        failure: DsecError | None = None
        missing: DsecError = Unavailable("no other node answers")
        for edge in self._answering():
            try:
                return edge, await _ask(edge, sandbox)
            except NotFound as exc:
                missing = exc
            except Unavailable as exc:
                failure = exc
        raise failure or missing

    def _answering(self) -> list[Edge]:
        return [edge for _, edge in self._edges.all() if edge.view and edge.view.healthy]

    def _not_sent(self, sandbox: SandboxId, missing: DsecError) -> DsecError:
        node = node_of(sandbox)
        if isinstance(missing, Unavailable):
            return Unavailable(
                f"node {node} is away, and the record of {sandbox} is not in the store: it can be "
                "read when the node is back",
                node=node,
            )
        if self._ownership.recall(sandbox) is not None:  # so the caller may know
            return NotFound(
                f"the record of {sandbox} is not in the store, and node {node} does not have it or "
                "is not one of this fleet any more",
                kind="sandbox",
                node=node,
            )
        return no_sandbox(sandbox)


async def _ask(edge: Edge, sandbox: SandboxId) -> SentTrajectory:
    try:
        with anyio.fail_after(ASK_TIMEOUT_S):
            return await edge.api.sent_trajectory(sandbox)
    except TimeoutError:
        raise Unavailable("a node does not say in time what its store has") from None
