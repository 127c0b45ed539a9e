"""A node's shared store as the API shows it."""

from __future__ import annotations

import contextlib

from dsec.base.errors import DsecError, NotFound
from dsec.images.lazy.node import NodeFiller
from dsec.images.store.interface import BlobStore
from dsec.wire.public_v1 import StoreView


async def view_store(node: str, store: BlobStore | None, filler: NodeFiller | None) -> StoreView:
    """The store, whether it answers, and what the node has fetched of it."""
    found = StoreView(node=node)
    if store is not None:
        found.url = store.url
        await _try_store(node, store, found)
    if filler is not None and filler.started:
        status = await (await filler.client()).status()
        found.front = status.front
        found.cache_used_bytes = status.used_bytes
        found.cache_budget_bytes = status.budget_bytes
        found.fetched_bytes = status.fetched_bytes
        found.requests = status.requests
        found.evicted_bytes = status.evicted_bytes
    return found


async def _try_store(node: str, store: BlobStore, found: StoreView) -> None:
    try:
        with contextlib.suppress(NotFound):
            await store.get_document("use", node)
    except DsecError as error:
        found.reachable, found.detail = False, error.message
