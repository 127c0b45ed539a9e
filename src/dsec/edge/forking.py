"""Forks: sandboxes that begin where another stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from dsec.edge.service import EdgeService
    from dsec.wire.public_v1 import BatchItem
    from dsec.wire.sandbox import Fork


def fork(
    service: EdgeService, sandbox: str, wanted: Fork, principal: str
) -> AbstractAsyncContextManager[AsyncIterator[BatchItem]]:
    """Make children."""
    raise NotImplementedError
