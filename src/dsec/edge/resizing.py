"""Live resize."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsec.edge.lifecycle.owner import Owner
    from dsec.wire.sandbox import Resize


async def resize(owner: Owner, change: Resize) -> None:
    """Give a live sandbox other limits."""
    raise NotImplementedError
