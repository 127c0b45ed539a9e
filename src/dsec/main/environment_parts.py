"""What a node's images share with others: the store, and the filler that loads from it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.base.errors import InvalidRequest
from dsec.main.parts import node_name, version
from dsec.main.settings import Settings

if TYPE_CHECKING:
    from dsec.images.lazy.config import FillerConfig
    from dsec.images.service import Shared

CACHE_SHARE = 5
"""Of the file system, 1/5 is for the cache unless told otherwise."""


@asynccontextmanager
async def open_shared(settings: Settings) -> AsyncIterator[Shared]:
    """Open the store and name the filler, which starts when it is first needed.

    Raises:
        InvalidRequest: the store's address is wrong.
        Unavailable: fanotify is asked for and this kernel lacks it.
    """
    from dsec.images.lazy.node import NodeFiller
    from dsec.images.service import Shared
    from dsec.images.store.opening import open_store
    from dsec.images.store.options import StoreOptions

    if settings.store_direct and not settings.store:
        raise InvalidRequest("store_direct needs a store: a directory mounted on every node")
    options = StoreOptions(timeout_s=settings.store_timeout_s)
    store = open_store(settings.store, options) if settings.store else None
    filler = NodeFiller(filler_config(settings))
    try:
        yield Shared(
            store=store,
            direct=settings.store_direct,
            filler=filler,
            record=settings.record_traces and store is not None,
            node=node_name(settings.state),
        )
    finally:
        await filler.aclose()
        if store is not None:
            await store.aclose()


def filler_config(settings: Settings) -> FillerConfig:
    """How the node's filler works; without a store it only records."""
    from dsec.images.lazy.config import FillerConfig

    cache = settings.state / "cache"
    return FillerConfig(
        store=settings.store or f"file://{settings.state / 'images' / 'no-store'}",
        cache=str(cache),
        run=str(settings.run),
        version=version(),
        front=settings.front,
        attempt_timeout_s=settings.store_timeout_s,
        budget_bytes=settings.cache_mb << 20 or _share_of_disk(settings.state),
    )


def _share_of_disk(state: Path) -> int:
    facts = os.statvfs(state)
    return facts.f_blocks * facts.f_frsize // CACHE_SHARE
