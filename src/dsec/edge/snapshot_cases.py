"""The edge's use cases about snapshots and forks: `EdgeService` without what it does besides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeVar

from typing_extensions import override

from dsec.edge.catalog import Catalog
from dsec.edge.forking import Forks
from dsec.edge.histories import Histories, sweep_histories
from dsec.edge.images import Images
from dsec.edge.lifecycle.owner import Owner
from dsec.edge.packing import Packer
from dsec.kit.blocking import in_thread
from dsec.kit.together import survive
from dsec.wire.public_v1 import BatchItem
from dsec.wire.sandbox import DiffEntry, Fork, Pack, SnapshotView

T = TypeVar("T")


class SnapshotCases(Catalog):
    """Pack, compare, fork; and what had happened before a snapshot."""

    _packer: Packer
    _forks: Forks

    def __init__(self, images: Images, histories: Histories) -> None:
        """Serve the node's images, opened by the caller, and histories."""
        super().__init__(images)
        self._histories = histories

    @abstractmethod
    async def owner(self, sandbox: str, *, awake: bool = True) -> Owner:
        """A sandbox to work with. Raises NotFound, SandboxGone."""

    @abstractmethod
    async def _detached(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it as the edge's own task: a caller who leaves does not stop it halfway."""

    async def pack(self, sandbox: str, wanted: Pack, principal: str) -> SnapshotView:
        """Take a snapshot of what it has written, running or paused.

        Raises:
            NotFound, SandboxGone. Conflict: the project has a snapshot of that name.
            StorageFull: no room for it; nothing is left of it.
        """
        owner = await self.owner(sandbox, awake=False)
        return await self._detached(partial(self._packer.pack, owner, wanted, principal))

    async def diff(self, sandbox: str) -> list[DiffEntry]:
        """What it has written so far. Raises NotFound, SandboxGone."""
        return await self._packer.diff(await self.owner(sandbox, awake=False))

    def fork(
        self, sandbox: str, wanted: Fork, principal: str
    ) -> AbstractAsyncContextManager[AsyncIterator[BatchItem]]:
        """Make sandboxes that begin where this one stands. Raises NotFound, SandboxGone."""
        return self._forks.fork(sandbox, wanted, principal)

    @override
    async def remove_snapshot(self, project: str, name: str) -> None:
        """Forget a snapshot, and what had happened before it. Raises NotFound, Conflict."""
        await super().remove_snapshot(project, name)
        await in_thread("disk", self._histories.forget, project, name)

    async def _sweep_histories(self) -> None:
        sweeping = partial(sweep_histories, self._histories, self._images.snapshots.get)
        await survive(sweeping, "removing what belongs to no snapshot")
