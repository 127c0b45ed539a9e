"""The store that nodes share, and what each keeps of it."""

from __future__ import annotations

from dsec.control import everywhere
from dsec.control.access import Caller
from dsec.control.edges import Edge, Edges
from dsec.iam.permissions import Permission
from dsec.wire.public_v1 import CollectReport, StoreView


class SharedStore:
    """The store as all nodes see it."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def show(self, caller: Caller) -> list[StoreView]:
        """How it looks from every node that answers, by node.

        Raises:
            PermissionDenied: the caller may not see nodes.
            Unavailable: no node answers.
        """
        caller.require_somewhere(Permission.NODE_READ)
        views = await everywhere.gather(self._edges, lambda api: api.store())
        return sorted(views, key=lambda view: view.node)

    async def collect(self, caller: Caller, *, dry_run: bool) -> CollectReport:
        """Remove what nothing refers to, once from each store the nodes name.

        Raises:
            PermissionDenied: the caller may not change images.
            Unsupported: there is no shared store.
            Unavailable: a node is away: who cannot be asked may be using it.
        """
        caller.require_everywhere(Permission.IMAGE_WRITE)
        by_url: dict[str, Edge] = {}
        for edge in everywhere.present(self._edges):
            by_url.setdefault((await edge.api.store()).url, edge)
        shared = {url: edge for url, edge in by_url.items() if url} or by_url
        return _sum([await edge.api.collect_store(dry_run=dry_run) for edge in shared.values()])


def _sum(reports: list[CollectReport]) -> CollectReport:
    return CollectReport(
        dry_run=reports[0].dry_run,
        blobs=sum(report.blobs for report in reports),
        bytes=sum(report.bytes for report in reports),
        kept_blobs=sum(report.kept_blobs for report in reports),
        detail="; ".join(report.detail for report in reports if report.detail),
    )
