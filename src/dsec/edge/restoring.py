"""Sandboxes that begin where a snapshot was taken: who may have them, and what they begin with."""

from __future__ import annotations

from dsec.base.errors import PermissionDenied
from dsec.base.snapshots import is_snapshot
from dsec.edge.forking import Origin
from dsec.edge.histories import Histories
from dsec.edge.images import Images
from dsec.kit.blocking import in_thread
from dsec.wire.edge_v1 import CreateOnEdge
from dsec.wire.sandbox import SnapshotView


async def origin(images: Images, histories: Histories, request: CreateOnEdge) -> Origin:
    """What a sandbox begins with; nothing, unless its image is a snapshot packed on this node.

    What had happened before is told to nobody but who packed it: a record has the arguments,
    variables, contents and outputs that cleaning takes out of the files.

    Raises:
        PermissionDenied: it is a snapshot with the residue of another principal's work.
        Unavailable: the store does not answer.
    """
    if not is_snapshot(request.spec.image):
        return Origin()
    snapshot = await images.snapshots.by_image(request.spec.image)
    if snapshot is None:
        return Origin()  # composing it says that there is none
    _check_residue(snapshot, request.principal)
    history = None
    if snapshot.packed_by == request.principal:
        history = await in_thread("disk", histories.find, snapshot)
    return Origin(
        history=history,
        inherited=snapshot.step if history else 0,
        unclean=not snapshot.cleaned,
    )


def _check_residue(snapshot: SnapshotView, principal: str) -> None:
    if not snapshot.cleaned and snapshot.packed_by != principal:
        raise PermissionDenied(
            f"snapshot {snapshot.name} was packed with what its build left behind (clean=False): "
            "only who packed it may restore it. Have it packed again without clean=False",
            snapshot=snapshot.name,
        )
