"""Routes about the store that nodes share."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from dsec.apiserver.gateway import caller_of
from dsec.control.shared_store import SharedStore
from dsec.kit.http import LateJson, Route, read_query
from dsec.kit.table import row
from dsec.wire.environment_queries import CollectQuery
from dsec.wire.public_v1 import CollectReport, StoreView


class StoreRest:
    """Handlers and their table."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    async def show_store(self, request: Request) -> LateJson:
        """The store as each node sees it, and what the node keeps of it."""
        return LateJson(partial(self._store.show, caller_of(request)))

    async def collect_store(self, request: Request) -> LateJson:
        """Remove from the store what nothing refers to."""
        dry_run = read_query(request, CollectQuery).dry_run
        return LateJson(partial(self._store.collect, caller_of(request), dry_run=dry_run))

    def routes(self) -> list[Route]:
        """The table."""
        path = "/v1/store"
        return [
            row("GET", path, self.show_store, answer=list[StoreView]),
            row("POST", f"{path}/collect", self.collect_store, None, CollectQuery, CollectReport),
        ]
