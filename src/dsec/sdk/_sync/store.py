# Generated from ../_async by tools/unasync.py; do not edit.
"""The store that nodes share."""

from __future__ import annotations

import builtins

from dsec.sdk._sync.call import Caller
from dsec.wire.public_v1 import CollectReport, StoreView

COLLECT_WITHIN_S = 3600.0


class SharedStore:
    """The store of images and layers; `client.store`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def show(self) -> builtins.list[StoreView]:
        """The store as each node sees it, and what the node keeps of it."""
        return self._caller.call(
            self._caller.request("GET", "/v1/store"), builtins.list[StoreView]
        )

    def collect(self, *, dry_run: bool = False) -> CollectReport:
        """Remove from it what nothing refers to, or only say what that would be.

        Raises:
            Unsupported: there is no shared store.
        """
        request = self._caller.request(
            "POST",
            "/v1/store/collect",
            {"dry_run": dry_run},
            patience_s=COLLECT_WITHIN_S,
        )
        return self._caller.call(request, CollectReport)
