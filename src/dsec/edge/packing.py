"""pack_diff: snapshots of what sandboxes have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsec.edge.images import Images
    from dsec.edge.lifecycle.owner import Owner
    from dsec.wire.sandbox import DiffEntry, Pack, SnapshotView


async def pack(images: Images, owner: Owner, wanted: Pack, principal: str) -> SnapshotView:
    """Take a snapshot."""
    raise NotImplementedError


async def diff(images: Images, owner: Owner) -> list[DiffEntry]:
    """What it has written so far."""
    raise NotImplementedError
