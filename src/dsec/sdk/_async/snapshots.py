"""Snapshots: what sandboxes had written, kept under names."""

from __future__ import annotations

import builtins

from dsec.sdk._async.call import Caller
from dsec.sdk._http import segment
from dsec.wire.sandbox import DiffEntry, SnapshotView

PATH = "/v1/snapshots"
DIFF_WITHIN_S = 600.0


class Snapshots:
    """The snapshots of your project; `client.snapshots`. `sandbox.pack` makes one."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def list(self) -> builtins.list[SnapshotView]:
        """All of them, newest first."""
        request = self._caller.request("GET", PATH)
        return await self._caller.call(request, builtins.list[SnapshotView])

    async def get(self, name: str) -> SnapshotView:
        """One of them.

        Raises:
            NotFound: there is none of that name.
        """
        request = self._caller.request("GET", f"{PATH}/{segment(name)}")
        return await self._caller.call(request, SnapshotView)

    async def remove(self, name: str) -> None:
        """Forget one.

        Raises:
            NotFound: there is none of that name.
            Conflict: a sandbox or another snapshot stands on it.
        """
        await self._caller.do(self._caller.request("DELETE", f"{PATH}/{segment(name)}"))

    async def diff(self, name: str) -> builtins.list[DiffEntry]:
        """What it has changed, by path.

        Raises:
            NotFound: there is none of that name.
        """
        path = f"{PATH}/{segment(name)}/diff"
        request = self._caller.request("GET", path, patience_s=DIFF_WITHIN_S)
        return await self._caller.call(request, builtins.list[DiffEntry])
