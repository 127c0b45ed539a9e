"""The edge's use cases that change what a live sandbox may have: limits and network rules."""

from __future__ import annotations

from functools import partial

from dsec.edge import entering, networking, resizing
from dsec.edge.backends.interface import Backend
from dsec.edge.expiry import Expiry
from dsec.edge.network.services import Services
from dsec.edge.snapshot_cases import SnapshotCases
from dsec.wire.phases import PhaseChange
from dsec.wire.sandbox import NetworkChange, NetworkView, Resize, SandboxView


class ChangeCases(SnapshotCases):
    """Limits, class, network."""

    _backends: dict[str, Backend]
    _services: Services
    _expiry: Expiry

    async def resize(self, sandbox: str, change: Resize) -> SandboxView:
        """Give it other limits.

        Raises:
            NotFound, SandboxGone. InvalidRequest, Unsupported, Conflict: nothing has changed.
        """
        owner = await self.owner(sandbox, awake=False)
        await self._detached(partial(resizing.resize, owner, change))
        return owner.view()

    async def network(self, sandbox: str) -> NetworkView:
        """Its network: rules, traffic, what was denied; one that is paused stays so.

        Raises:
            NotFound, SandboxGone.
        """
        owner = await self.owner(sandbox, awake=False)
        if owner.ended_at is not None:
            raise owner.gone()
        return await networking.look(self._backends[owner.record.spec.backend], owner.record)

    async def set_network(self, sandbox: str, change: NetworkChange) -> NetworkView:
        """Give it other network rules; on return they are in force, and connections they forbid cut.

        Raises:
            NotFound, SandboxGone. InvalidRequest, Unsupported, Conflict: nothing has changed.
        """
        owner = await self.owner(sandbox, awake=False)
        work = partial(networking.change, owner, change.rules, self._services)
        await self._detached(work)
        return await self.network(sandbox)

    async def enter_phase(self, sandbox: str, change: PhaseChange) -> SandboxView:
        """Have it enter a phase; on return all of that is in force. A paused one is woken.

        Raises:
            NotFound, SandboxGone. Conflict, Unsupported: nothing has changed, but that what ran may
            have been ended.
        """
        owner = await self.owner(sandbox)
        await self._detached(partial(entering.enter, owner, change.name, self._services))
        self._expiry.watch(owner)
        return owner.view()
